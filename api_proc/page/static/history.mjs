// The latest two minutes of the engine, computed from views of /debug/engine.

export const WINDOW_S = 120;
const MAX_EVENTS = 50;
// The core reports about once a second.
const STALE_S = 2.5;
// Their replacement does not interrupt requests: it is listed, not marked in the charts.
const HELPERS = ["standby", "standby_core", "zygote"];

export class History {
  // {t, running, waiting, kv, states, generated, prompts, hits}: t in seconds, rates per second; null: a gap.
  points = [];
  // Newest first: {time, text}.
  events = [];
  // Times at which a serving process was replaced.
  marks = [];
  // Time of the last change of each process, by name.
  changedAt = new Map();
  #processes = new Map();
  #last = null;
  #reported = -Infinity;

  // Take a view that arrived at `t`; `clock` is the time of day to show.
  add(view, t, clock) {
    this.#compare(view.processes ?? [], t, clock);
    this.#measure(view, t);
    this.#forget(t);
  }

  // The server did not answer at `t`.
  miss(t) {
    this.points.push(gap(t));
    this.#forget(t);
  }

  #compare(rows, t, clock) {
    for (const row of rows) {
      if (row.role === "supervisor") continue; // its state is the engine's
      const name = nameOf(row);
      const old = this.#processes.get(name);
      this.#processes.set(name, row);
      if (old === undefined || (old.epoch === row.epoch && old.state === row.state)) continue;
      this.changedAt.set(name, t);
      if (old.epoch !== row.epoch) {
        const pids = `pid ${old.pid ?? "–"} → ${row.pid ?? "–"}`;
        this.events.unshift({ time: clock, text: `${name} replaced: ${pids}, epoch ${row.epoch}` });
        if (!HELPERS.includes(row.role)) this.marks.push(t);
      } else if (row.state !== "ready") {
        this.events.unshift({ time: clock, text: `${name} (pid ${row.pid ?? "–"}): ${row.state}` });
      }
    }
    this.events.length = Math.min(this.events.length, MAX_EVENTS);
  }

  #measure({ time_s: now, load, load_age_s: age }, t) {
    if (load === null || age > STALE_S) {
      this.points.push(gap(t));
      return;
    }
    const reported = now - age;
    if (reported <= this.#reported + 0.1) return;
    const seconds = reported - this.#reported;
    const rate = (name) => {
      const count = this.#last === null ? -1 : load[name] - this.#last[name];
      return count < 0 ? null : count / seconds; // a new core counts from 0
    };
    this.points.push({
      t,
      running: load.num_running_reqs,
      waiting: load.num_waiting_reqs,
      kv: load.kv_cache_usage,
      states: load.state_cache_usage ?? null,
      generated: rate("generation_tokens"),
      prompts: rate("prompt_tokens"),
      hits: this.#hitRate(load),
    });
    this.#last = load;
    this.#reported = reported;
  }

  // Return the share of the looked-up tokens that were found; the last share while none are.
  #hitRate(load) {
    const before = this.#last;
    const queries = before === null ? 0 : load.prefix_cache_queries - before.prefix_cache_queries;
    if (queries > 0) return (load.prefix_cache_hits - before.prefix_cache_hits) / queries;
    const share = load.prefix_cache_hits / load.prefix_cache_queries;
    return this.points.findLast((point) => point.hits !== null)?.hits ?? (share >= 0 ? share : null);
  }

  #forget(t) {
    const first = t - WINDOW_S;
    this.points = this.points.filter((point) => point.t >= first);
    this.marks = this.marks.filter((time) => time >= first);
  }
}

export function nameOf({ role, rank, name: given = "" }) {
  if (given && role === "api") return given;
  const name = role.replaceAll("_", " ");
  return rank > 0 ? `${name} ${rank}` : name;
}

function gap(t) {
  return {
    t, running: null, waiting: null, kv: null, states: null,
    generated: null, prompts: null, hits: null,
  };
}
