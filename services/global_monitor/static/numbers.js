// The tiles on top and the curves of the last minutes.
import { h, redraw, s } from "./dom.js";
import { count, duration, percent, rate, seconds } from "./format.js";

const gateways = state => state.live.map(each => each.process)
  .filter(process => process.role === "gateway" && process.status === "up");
const recent = (state, name, n = 5) => {
  const tail = (state.cluster.samples[name] ?? []).slice(-n);
  return tail.length ? tail.reduce((a, b) => a + b, 0) / tail.length : NaN;
};

function tile(label, value, unit = "", more = "", kind = "") {
  return h("div", { class: "card tile" }, h("div", { class: "label" }, label),
    h("b", { class: kind }, value, unit ? h("small", {}, unit) : null), h("div", { class: "more" }, more));
}

export function drawTiles(parent, state) {
  const all = gateways(state);
  const sum = name => all.reduce((total, process) => total + (process.stats[name] ?? 0), 0);
  const worst = name => all.reduce((most, process) => Math.max(most, process.stats[name] ?? 0), 0) || NaN;
  const failed = sum("failed_total"), refused = sum("rejected_total") + sum("refused_total");
  const { cluster } = state;
  const kv = name => state.live.filter(({ process }) => process.status === "up")
    .reduce((total, { process }) => total + (process.stats[name] ?? 0), 0);
  const blocks = kv("kv_total_blocks"), free = kv("kv_free_blocks"), cached = kv("kv_cached_blocks");
  redraw(parent,
    tile("Arrivals", rate(cluster.arrival_rate), "req/s", `forecast ${rate(cluster.arrival_rate_forecast)}`),
    tile("Running", count(sum("requests_running")), "", `${count(sum("requests_waiting"))} waiting`),
    tile("Output", rate(recent(state, "output_tokens_per_s")), "tok/s",
      `prompts ${rate(recent(state, "prompt_tokens_per_s"))}`),
    tile("TTFT p50", seconds(worst("ttft_p50_s")), "", `p99 ${seconds(worst("ttft_p99_s"))}`),
    tile("Between tokens p50", seconds(worst("itl_p50_s")), "", `p99 ${seconds(worst("itl_p99_s"))}`),
    tile("KV in use", percent(blocks ? 1 - (free + cached) / blocks : NaN), "", `${percent(blocks ? cached / blocks : NaN)} cached`),
    tile("Finished", count(sum("finished_total")), "",
      `mean ${count(Math.round(cluster.mean_prompt_tokens))} + ${count(Math.round(cluster.mean_output_tokens))} tok`),
    tile("Failed", count(failed), "", `${count(refused)} refused`, failed ? "bad" : ""));
}

function chart(title, ages, curves, format) {
  const width = 320, height = 76;
  const span = Math.min(300, Math.max(60, ages[0] ?? 0));
  const largest = Math.max(1e-9, ...curves.flatMap(curve => curve.values));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${title}, last ${duration(span)}, at most ${format(largest)}` });
  const line = (points, stroke, filled) => svg.append(s(filled ? "polygon" : "polyline", {
    points: points.map(point => point.map(v => v.toFixed(1)).join(",")).join(" "), "vector-effect": "non-scaling-stroke",
    style: filled ? `fill:${stroke};opacity:.13` : `fill:none;stroke:${stroke};stroke-width:1.7;stroke-linejoin:round` }));
  line([[0, height - .5], [width, height - .5]], "var(--line)", false);
  curves.forEach((curve, index) => {
    const points = curve.values.map((value, i) =>
      [width * (1 - ages[i] / span), height - 2 - (height - 8) * value / largest]);
    if (points.length < 2) return;
    const colour = index ? "var(--be)" : "var(--accent)";
    if (!index) line([[points[0][0], height], ...points, [points.at(-1)[0], height]], colour, true);
    line(points, colour, false);
  });
  return h("div", { class: "card chart" },
    h("div", { class: "head" }, h("b", {}, title), curves.map((curve, index) =>
      h("span", { class: index ? "key second" : "key" },
        `${curve.label} ${curve.values.length ? format(curve.values.at(-1)) : "–"}`))),
    svg, h("div", { class: "max" }, `at most ${format(largest > 1e-9 ? largest : 0)}`));
}

export function drawCharts(parent, state) {
  const ages = state.cluster.sample_ages_s;
  const curve = (label, name) => ({ label, values: state.cluster.samples[name] ?? [] });
  redraw(parent,
    chart("Tokens/s", ages, [curve("output", "output_tokens_per_s"), curve("prompt", "prompt_tokens_per_s")], rate),
    chart("Requests", ages, [curve("running", "requests_running"), curve("waiting", "requests_waiting")], count),
    chart("Arrivals/s", ages, [curve("arrived", "arrivals_per_s"), curve("failed", "failed_per_s")], rate),
    chart("KV cache", ages, [curve("in use or cached", "kv_used")], percent));
}
