// The live view: processes, load and events, read twice a second while the page is visible.

import { drawChart, roundUp } from "./chart.mjs";
import { make } from "./dom.mjs";
import { History, nameOf } from "./history.mjs";

const INTERVAL_MS = 500;
const HIGHLIGHT_S = 8;

const percent = (value) => `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const rounded = (value) => Math.round(value).toLocaleString("en");
const CHARTS = [
  {
    title: "Throughput, tokens/s",
    lines: [
      { name: "generated", values: (point) => point.generated, format: rounded },
      { name: "prompt", values: (point) => point.prompts, format: rounded },
    ],
  },
  {
    title: "Requests",
    lines: [
      { name: "running", values: (point) => point.running, format: rounded },
      { name: "waiting", values: (point) => point.waiting, format: rounded },
    ],
  },
  {
    title: "KV cache",
    max: 1,
    lines: [
      { name: "in use", values: (point) => point.kv, format: percent },
      { name: "states", values: (point) => point.states, format: percent, isOptional: true },
    ],
  },
  {
    title: "Prefix cache",
    max: 1,
    lines: [{ name: "found", values: (point) => point.hits, format: percent }],
  },
];

export class LiveView {
  #server;
  #history = new History();
  #charts;
  #elements;
  #timer = null;

  // `elements`: state, summary, processes (a tbody), noProcesses, charts, events, note.
  constructor(server, elements) {
    this.#server = server;
    this.#elements = elements;
    this.#charts = CHARTS.map((chart) => makeChart(chart, elements.charts));
    document.addEventListener("visibilitychange", () => this.#schedule(0));
    window.addEventListener("resize", () => this.#draw(performance.now() / 1000));
    this.#schedule(0);
  }

  #schedule(ms) {
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible") {
      this.#timer = setTimeout(() => this.#poll(), ms);
    }
  }

  async #poll() {
    const startedAt = performance.now();
    let view = null;
    let problem = "";
    try {
      view = await this.#server.get("debug/engine", true);
    } catch (error) {
      problem = error.status ? error.message : "The API does not answer.";
    }
    const t = performance.now() / 1000;
    if (view === null) this.#history.miss(t);
    else this.#history.add(view, t, new Date().toLocaleTimeString("en-GB"));
    this.#show(view, problem, t);
    this.#schedule(Math.max(0, INTERVAL_MS - (performance.now() - startedAt)));
  }

  #show(view, problem, t) {
    const { state, summary, note } = this.#elements;
    const isGood = view?.is_ready === true;
    state.textContent = view === null ? "unreachable" : view.is_draining ? "draining" : view.state;
    state.dataset.state = view === null ? "down" : isGood ? "good" : "busy";
    note.textContent = problem || view.failure || "";
    note.hidden = note.textContent === "";
    if (view !== null) {
      const rate = this.#history.points.findLast((point) => point.generated !== null);
      const running = view.load?.num_running_reqs ?? 0;
      const waiting = view.load?.num_waiting_reqs ?? 0;
      const speed = rounded(rate?.generated ?? 0);
      summary.textContent = `${running} running · ${waiting} waiting · ${speed} tokens/s`;
      this.#elements.noProcesses.hidden = view.processes !== null;
      this.#showProcesses(view.processes ?? [], t);
    }
    this.#elements.processes.dataset.isStale = String(view === null);
    this.#showEvents();
    this.#draw(t);
  }

  // Change what differs only: a person may be selecting a pid.
  #showProcesses(rows, t) {
    const body = this.#elements.processes;
    while (body.rows.length > rows.length) body.lastElementChild.remove();
    rows.forEach((row, index) => {
      const line = body.rows[index] ?? body.appendChild(makeLine());
      const name = nameOf(row);
      const changed = this.#history.changedAt.get(name);
      line.className = changed !== undefined && t - changed < HIGHLIGHT_S ? "changed" : "";
      line.dataset.process = name;
      line.dataset.state = row.state;
      const megabytes = `${Math.round(row.rss_bytes / 2 ** 20)} MiB`;
      [name, row.pid ?? "–", row.epoch, row.state, megabytes, row.num_restarts].forEach((value, i) => {
        if (line.cells[i].textContent !== String(value)) line.cells[i].textContent = value;
      });
    });
  }

  // Add the new events only: the list is announced to screen readers.
  #showEvents() {
    const list = this.#elements.events;
    const events = this.#history.events;
    const shown = list.firstElementChild?.troikaEvent;
    const numNew = shown ? Math.max(0, events.indexOf(shown)) : events.length;
    for (const event of events.slice(0, numNew).reverse()) {
      const item = make("li", {}, make("time", {}, event.time), ` ${event.text}`);
      item.troikaEvent = event;
      list.prepend(item);
    }
    while (list.children.length > events.length) list.lastElementChild.remove();
  }

  #draw(now) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = { grid: color("--line"), mark: color("--alert"), text: color("--soft") };
    const lineColors = [color("--chart-1"), color("--chart-2")];
    const { points, marks } = this.#history;
    for (const { spec, canvas, values, legend } of this.#charts) {
      const lines = spec.lines.map(({ values: read }, index) => (
        { values: read, color: lineColors[index], dash: index === 1 ? [4, 2] : [] }));
      const highest = Math.max(0, ...points.flatMap((point) => (
        spec.lines.map((line) => line.values(point) ?? 0))));
      const max = spec.max ?? roundUp(highest);
      const top = spec.lines[0].format(max);
      drawChart(canvas, { points, marks, lines, max, top, now, colors });
      const texts = spec.lines.flatMap((line, index) => {
        legend[index].hidden = Boolean(line.isOptional) && points.every((p) => line.values(p) === null);
        if (legend[index].hidden) return [];
        const value = points.length === 0 ? null : line.values(points[points.length - 1]);
        values[index].textContent = value === null ? "–" : line.format(value);
        return `${line.name} ${values[index].textContent}`;
      });
      canvas.setAttribute("aria-label", `${spec.title}: ${texts.join(", ")}`);
    }
  }
}

function makeLine() {
  const cells = Array.from({ length: 5 }, () => make("td", {}));
  cells[2].className = "process-state";
  return make("tr", {}, make("th", { scope: "row" }), ...cells);
}

function makeChart(spec, parent) {
  const canvas = make("canvas", {});
  canvas.setAttribute("role", "img");
  const values = spec.lines.map(() => make("b", {}, "–"));
  const legend = spec.lines.map((line, index) => (
    make("span", { className: `line-${index + 1}` }, values[index], ` ${line.name}`)));
  parent.append(make("figure", {},
    make("figcaption", {}, make("span", {}, spec.title), make("span", {}, ...legend)),
    canvas));
  return { spec, canvas, values, legend };
}
