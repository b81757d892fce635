// Rates, gaps and replaced processes, from a sequence of views.
import assert from "node:assert/strict";
import test from "node:test";
import { History, WINDOW_S, nameOf } from "../../../api_proc/page/static/history.mjs";
import { roundUp } from "../../../api_proc/page/static/chart.mjs";

const load = (generation_tokens, queries = 0, hits = 0) => ({
  num_running_reqs: 1, num_waiting_reqs: 2, kv_cache_usage: 0.25, prompt_tokens: 0,
  generation_tokens, prefix_cache_queries: queries, prefix_cache_hits: hits,
});
const row = (role, pid, epoch, state = "ready", rank = 0) => ({ role, rank, pid, epoch, state });
const view = (time_s, counters, processes = [], load_age_s = 0) => (
  { time_s, load: counters, load_age_s, processes });

test("rates come from the core's reports, not from the times of arrival", () => {
  const history = new History();
  history.add(view(50, load(100)), 1, "");
  history.add(view(50.5, load(100), [], 0.5), 1.6, "");
  history.add(view(51, load(300)), 2.2, "");
  const rates = history.points.map((point) => point.generated);
  assert.deepEqual(rates, [null, 200]);
  assert.equal(history.points[1].waiting, 2);
});

test("a new core counts from 0; a silent one leaves a gap", () => {
  const history = new History();
  history.add(view(50, load(100)), 1, "");
  history.add(view(51, load(10)), 2, "");
  history.add(view(55, load(10), [], 4), 6, "");
  history.miss(7);
  history.add(view(60, null), 8, "");
  assert.deepEqual(history.points.map((point) => point.generated), [null, null, null, null, null]);
  assert.deepEqual(history.points.map((point) => point.kv), [0.25, 0.25, null, null, null]);
});

test("the share of state blocks is only there with recurrent layers", () => {
  const history = new History();
  history.add(view(50, load(0)), 1, "");
  history.add(view(51, { ...load(0), state_cache_usage: null }), 2, "");
  history.add(view(52, { ...load(0), state_cache_usage: 0.5 }), 3, "");
  history.miss(9);
  assert.deepEqual(history.points.map((point) => point.states), [null, null, 0.5, null]);
});

test("the share of found tokens is that of the last look-ups", () => {
  const history = new History();
  [[0, 0], [10, 5], [10, 5], [20, 15]].forEach(([queries, hits], i) => (
    history.add(view(50 + i, load(0, queries, hits)), i, "")));
  assert.deepEqual(history.points.map((point) => point.hits), [null, 0.5, 0.5, 1]);
});

test("a replaced process is an event; in the charts it is marked if it serves", () => {
  const history = new History();
  history.add(view(1, load(0), [row("worker", 10, 3), row("standby", 11, 4), row("worker", 9, 5, "ready", 1)]), 1, "a");
  assert.equal(history.events.length, 0);
  history.add(view(2, load(0), [row("worker", 11, 4), row("standby", null, 6, "starting"),
    row("worker", null, 5, "backoff", 1)]), 2, "b");
  assert.deepEqual(history.events.map((event) => event.text).sort(), [
    "standby replaced: pid 11 → –, epoch 6",
    "worker 1 (pid –): backoff",
    "worker replaced: pid 10 → 11, epoch 4",
  ]);
  assert.deepEqual(history.marks, [2]);
  assert.equal(history.changedAt.get("worker"), 2);
  const supervisor = [row("supervisor", 1, 0, "starting"), row("supervisor", 1, 0)];
  supervisor.forEach((own) => history.add(view(3, load(0), [own, row("worker", 11, 4)]), 3, "c"));
  assert.equal(history.events.length, 3);
});

test("several API processes have the supervisor's names", () => {
  assert.equal(nameOf({ ...row("api", 7, 3, "ready", 1), name: "api-1" }), "api-1");
  assert.equal(nameOf(row("api", 7, 3, "ready", 1)), "api 1");
  assert.equal(nameOf({ ...row("standby_core", 7, 3), name: "standby_core" }), "standby core");
});

test("everything is bounded", () => {
  const history = new History();
  for (let t = 0; t < 3 * WINDOW_S; t++) history.add(view(t, load(t), [row("core", t + 1, t + 1)]), t, "");
  assert.ok(history.points.length <= WINDOW_S + 1);
  assert.ok(history.marks.length <= WINDOW_S + 1);
  assert.equal(history.events.length, 50);
});

test("an axis ends at a round number", () => {
  assert.deepEqual([0, 1, 3, 7, 10, 11, 4999, 5001].map(roundUp), [1, 1, 5, 10, 10, 20, 5000, 10000]);
});
