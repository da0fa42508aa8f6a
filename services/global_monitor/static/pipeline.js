// The picture of the pipeline: processes as nodes, what flows between them as edges.
import { redraw, s } from "./dom.js";
import { bytes, count, duration, percent, plural, rate } from "./format.js";
import { clientLabels, narrow, wide } from "./layout.js";

const MOST_SQUARES = 22;
const flowing = value => Number.isFinite(value) && value > 0;
const text = (x, y, content, attributes = {}) => s("text", { x, y, ...attributes }, content);

/** What is known of each place of the pipeline, by name; several gateways are one place. */
function places(state) {
  const known = state.cluster.processes.filter(each => each.status !== "left");
  const of = role => known.filter(each => each.role === role);
  const worker = each => ({ each, view: state.workers.find(view => view.instance === each.instance) });
  return {
    gateway: of("gateway"), predictor: of("length_predictor"), manager: of("bucketing_manager"), monitor: of("global_monitor"),
    prefill: of("prefill_worker").map(worker), decode: of("decode_worker").map(worker),
  };
}

const total = (all, name) => {
  const found = all.map(each => each.rates[name]).filter(Number.isFinite);
  return found.length ? found.reduce((a, b) => a + b, 0) : NaN;
};

function condition(all) {
  if (!all.length) return ["down", "not heard of"];
  const gone = all.filter(each => each.status === "down");
  if (gone.length) return ["down", all.length > 1 ? `${gone.length} of ${all.length} down`
    : `down for ${duration(gone[0].since_s)}`];
  const late = all.filter(each => !each.ready);
  if (late.length) return ["late", all.length > 1 ? `${late.length} not ready` : "not ready"];
  const again = all.find(each => each.restarts && each.since_s < 20);
  if (again) return ["late", `restarted ${duration(again.since_s)} ago`];
  return ["", ""];
}

function node(box, name, all, lines, extra = []) {
  const [kind, word] = condition(all);
  const right = box.x + box.w - 14;
  const title = all.length > 1 ? `${name} × ${all.length}` : name;
  return s("g", { class: `node ${kind}`, role: "img", "aria-label": [title, word || "up", ...lines].join(", ") },
    s("rect", { class: "box", x: box.x, y: box.y, width: box.w, height: box.h, rx: 11 }),
    s("circle", { class: "dot", cx: right, cy: box.y + 18, r: 4.5 }),
    text(box.x + 13, box.y + 22, title, { class: "name" }),
    text(box.x + 13, box.y + 41, word || lines[0] || "", { class: word ? `state ${kind === "down" ? "bad" : "warn"}` : "",
      style: word ? `fill:var(--${kind === "down" ? "bad" : "warn"})` : null }),
    !word && lines[1] ? text(box.x + 13, box.y + 58, lines[1], { class: "dim" }) : null,
    word && kind === "down" ? null : extra);
}

/** Which of several managers decides now. */
function leader(all) {
  const leads = all.find(each => each.status === "up" && each.stats.leads);
  return leads ? `${leads.instance} leads` : "none leads";
}

/** Waiting requests as squares, real-time ones first. */
function squares(box, classes) {
  const room = Math.min(MOST_SQUARES, Math.floor((box.w - 26) / 8));
  const all = classes.reduce((sum, each) => sum + each.requests, 0), marks = [];
  for (const each of classes) // where they do not all fit, each class has its share
    for (let n = 0; n < Math.ceil(each.requests * Math.min(1, room / all)) && marks.length < room; n++) marks.push(each.traffic_class);
  return marks.map((kind, n) =>
    s("rect", { class: kind, x: box.x + 13 + 8 * n, y: box.y + box.h - 15, width: 6, height: 6, rx: 1.5 }));
}

function meter(box, share) {
  const width = box.w - 26 - 62;
  return [s("rect", { class: "meter", x: box.x + 13, y: box.y + box.h - 14, width, height: 5, rx: 2.5 }),
    text(box.x + box.w - 13, box.y + box.h - 8.5, `KV ${percent(share)}`, { class: "dim", "text-anchor": "end" }),
    share > 0 ? s("rect", { class: "fill", x: box.x + 13, y: box.y + box.h - 14, width: Math.max(3, width * share), height: 5, rx: 2.5 }) : null];
}

function workerNode(box, { each, view }) {
  const { stats } = each;
  const used = stats.kv_total_blocks ? (stats.kv_used_blocks ?? 0) / stats.kv_total_blocks : 0;
  const batch = view?.iteration;
  const first = batch ? [batch.prefill_rows ? `${batch.prefill_rows} prefill` : "", batch.decode_rows ? `${batch.decode_rows} decode` : ""]
    .filter(Boolean).join(" + ") : `${count(stats.running ?? 0)} running`;
  const elsewhere = [["parked", "parked"], ["awaiting_kv", "to come"]].filter(([name]) => stats[name])
    .map(([name, word]) => ` · ${count(stats[name])} ${word}`).join("");
  return node(box, each.instance, [each],
    [first, `${count(stats.waiting ?? 0)} waiting${elsewhere}`], meter(box, used));
}

/** Something was placed there, as far as it is known: it has sequences. */
const busy = ({ each: { stats } }) =>
  ["running", "waiting", "parked", "awaiting_kv"].some(name => stats[name]);

function edge(path, value, kind = "", scale = 10) {
  const on = flowing(value);
  const width = on ? Math.min(4.5, 1.6 + Math.log10(1 + 9 * value / scale)) : 1.5;
  const pace = on ? Math.max(0.35, 1.6 - 0.5 * Math.log10(1 + 9 * value / scale)) : 1;
  // Drawn anew every second: the dashes go on where they were.
  const phase = -((performance.now() / 1000) % pace);
  return s("path", { class: `edge ${kind} ${on ? "flows" : ""}`, d: path,
    style: `stroke-width:${width.toFixed(2)};--pace:${pace.toFixed(2)}s;--phase:${phase.toFixed(3)}s` });
}

const label = (at, value, sub = false) => value ? s("text", { class: sub ? "edge-label sub" : "edge-label", x: at.x, y: at.y,
  "text-anchor": at.anchor ?? "middle" }, value) : null;

export function drawPipeline(parent, state) {
  const there = places(state);
  const width = Math.max(300, parent.clientWidth || 900);
  const plan = (width < 760 ? narrow : wide)(width, there.prefill.length, there.decode.length);
  const { box, paths } = plan;
  const arrivals = total(there.gateway, "requests_total"), prompts = total(there.gateway, "prompt_tokens_total");
  const tokens = total(there.gateway, "generation_tokens_total"), placed = total(there.manager, "dispatched_total");
  const predictions = total(there.predictor, "predictions_total");
  const kv = state.workers.reduce((sum, view) => sum + (view.kv_sent_per_s ?? 0), 0);
  const sum = (all, name) => all.reduce((n, each) => n + (each.stats[name] ?? 0), 0);
  const perS = (value, unit) => Number.isFinite(value) ? `${rate(value)} ${unit}` : "";
  const classes = state.queue?.classes ?? [];
  const shown = (all, boxes) => boxes.map((at, n) => n === boxes.length - 1 && all.length > boxes.length
    ? node(at, `${all.length - n} more workers`, all.slice(n).map(one => one.each),
      [`${count(sum(all.slice(n).map(one => one.each), "running"))} running`])
    : workerNode(at, all[n]));

  const edges = [
    paths.report.map(path => s("path", { class: "edge report", d: path })),
    edge(paths.arrive, arrivals), edge(paths.predict, predictions), edge(paths.submit, arrivals),
    paths.place.map(({ to, n, d }) => edge(d, busy(there[to][n]) ? placed : 0)),
    paths.kv.map(path => edge(path, kv, "kv", 1e6)),
    paths.tokens.map(({ of, d }) => edge(d, total(there[of].map(one => one.each), "decode_tokens_total"), "tokens", 100)), edge(paths.answer, tokens, "tokens", 100)];
  const nodes = [
    s("g", { class: "node" }, s("rect", { class: "box", x: box.client.x, y: box.client.y, width: box.client.w, height: box.client.h, rx: 18 }),
      text(box.client.x + box.client.w / 2, box.client.y + box.client.h / 2 + 4.5, "clients", { class: "name", "text-anchor": "middle" })),
    node(box.gateway, "gateway", there.gateway, [`${count(sum(there.gateway, "requests_running"))} running`,
      `${count(sum(there.gateway, "requests_waiting"))} waiting`]),
    node(box.predictor, "predictor", there.predictor, [`${count(sum(there.predictor, "observations"))} lengths learned`]),
    node(box.monitor, "monitor", there.monitor, ["all processes report"]),
    node(box.manager, "manager", there.manager, [`${count(sum(there.manager, "waiting"))} waiting`,
      there.manager.length > 1 ? leader(there.manager) : plural(sum(there.manager, "workers"), "worker")], squares(box.manager, classes)),
    shown(there.prefill, box.prefill), shown(there.decode, box.decode)];
  const at = plan.labels;
  const labels = [
    ...clientLabels(at, perS(arrivals, "req/s"), perS(prompts, "tok/s"), perS(tokens, "tok/s"), label),
    label(at.predict, flowing(predictions) ? perS(predictions, "/s") : ""),
    label(at.submit, perS(arrivals, "req/s")), label(at.place, Number.isFinite(placed) ? `${rate(placed)} placed/s` : ""),
    paths.kv.length ? label(at.kv, kv > 0 ? `KV ${bytes(kv)}/s` : "KV 0") : null,
    label(at.tokens, perS(tokens, "tok/s"))];
  redraw(parent, s("svg", { viewBox: `0 0 ${width} ${plan.height}`, width, height: plan.height, role: "group",
    "aria-label": "Processes of the pipeline and what flows between them" }, edges, nodes, labels));
}
