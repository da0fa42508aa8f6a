// Curves over time: axes with units, a cursor for pointer and arrow keys, gaps where nothing was measured.
import { h, redraw, s } from "./dom.js";
import { count, duration, percent, rate, seconds } from "./format.js";

const COLOURS = ["var(--accent)", "var(--s3)"];
const cursors = new Map(); // by title: age in seconds of the moment that is read
const STEPS = [1, 2, 5];

/** Round numbers around the values: of a logarithmic axis decades, and what divides them where there are few. */
function logarithmic(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const step of STEPS) all.push(step * 10 ** power);
  const below = all.filter(tick => tick <= low * 1.0001), above = all.filter(tick => tick >= high * 0.9999);
  const from = below.at(-1) ?? low, to = above[0] === from ? all[all.indexOf(from) + 1] : above[0];
  const ticks = all.filter(tick => tick >= from && tick <= to);
  const decades = ticks.filter(tick => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-6);
  const shown = ticks.length <= 5 || decades.length < 2 ? ticks : decades;
  return { ticks: shown, at: value => Math.log(value / from) / Math.log(to / from) };
}

function linear(values, most) {
  const high = Math.max(...values, 0);
  const power = 10 ** Math.floor(Math.log10(high || 1));
  const to = most ?? (STEPS.map(step => step * power).find(tick => tick >= high) ?? 10 * power);
  return { ticks: [0, to / 2, to], at: value => value / to };
}

/** Parts of a curve between gaps; a lone point is drawn, too. */
function segments(points) {
  const parts = [[]];
  for (const point of points) if (point) parts.at(-1).push(point); else parts.push([]);
  return parts.filter(part => part.length).map(part => part.length > 1 ? part : [part[0], part[0]]);
}

function chart({ title, curves, format, log = false, most, slo }, ages, span) {
  const known = curves.flatMap(({ values }) => values).filter(value => value !== null && (!log || value > 0));
  const { ticks, at } = log ? logarithmic([...(known.length ? known : [0.01]), ...(slo ? [slo] : [])]) : linear(known, most);
  const svg = s("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const line = (points, style) => svg.append(s("polyline", { "vector-effect": "non-scaling-stroke", style,
    points: points.map(point => point.map(v => v.toFixed(2)).join(",")).join(" ") }));
  for (const tick of ticks) line([[0, 100 - 100 * at(tick)], [1000, 100 - 100 * at(tick)]], "fill:none;stroke:var(--line);stroke-width:1");
  if (slo) line([[0, 100 - 100 * at(slo)], [1000, 100 - 100 * at(slo)]], "fill:none;stroke:var(--bad);stroke-width:1.3;stroke-dasharray:6 4");
  curves.forEach(({ values }, index) => {
    const points = values.map((value, i) => value === null || (log && value <= 0) || ages[i] > span ? null
      : [1000 * (1 - ages[i] / span), 100 - 100 * at(value)]);
    for (const part of segments(points)) line(part, `fill:none;stroke:${COLOURS[index]};stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round`);
  });
  const keys = curves.map(({ label }, index) => h("span", { class: index ? "key second" : "key" }, label));
  const when = h("span", { class: "when" }), cursor = h("div", { class: "cursor", hidden: true });
  const read = age => {
    const i = age === null ? ages.length - 1
      : ages.reduce((best, each, n) => Math.abs(each - age) < Math.abs(ages[best] - age) ? n : best, 0);
    curves.forEach(({ label, values }, index) => { keys[index].textContent = `${label} ${format(values[i] ?? NaN)}`; });
    when.textContent = age === null || i < 0 ? "" : ages[i] < 1.5 ? "now" : `${duration(ages[i])} ago`;
    cursor.hidden = age === null || i < 0;
    if (i >= 0) cursor.style.left = `${100 * (1 - ages[i] / span)}%`;
    return i;
  };
  const move = age => { cursors.set(title, age); read(age); };
  const plot = h("div", { class: "plot", tabindex: "0", "data-key": `c:${title}`, role: "img", "aria-label":
    `${title}, last ${duration(span)}: ${curves.map(each => `${each.label} ${format(each.values.at(-1) ?? NaN)}`).join(", ")}; arrow keys read earlier values` },
  svg, ticks.map(tick => h("span", { class: "y", style: `top:${100 - 100 * at(tick)}%` }, format(tick))),
  [1, Math.round(span / 120) * 60 / span].map(share => h("span", { class: "x", style: `left:${100 - 100 * share}%` }, `−${duration(span * share)}`)),
  h("span", { class: "x last" }, "now"),
  slo ? h("span", { class: at(slo) > 0.8 ? "slo below" : "slo", style: `top:${100 - 100 * at(slo)}%` }, `SLO ${format(slo)}`) : null, cursor);
  const spot = event => (1 - (event.clientX - plot.getBoundingClientRect().left) / plot.clientWidth) * span;
  plot.addEventListener("pointermove", event => move(Math.max(0, Math.min(span, spot(event)))));
  plot.addEventListener("pointerleave", () => move(null));
  plot.addEventListener("blur", () => setTimeout(() => { // drawn anew, it has the focus again
    if (document.activeElement?.dataset.key !== plot.dataset.key) cursors.set(title, null);
  }));
  plot.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !ages.length) return;
    event.preventDefault();
    move(ages[Math.max(0, Math.min(ages.length - 1, read(cursors.get(title) ?? 0) + by))]);
  });
  read(cursors.get(title) ?? null);
  return h("div", { class: "card chart" }, h("div", { class: "head" }, h("b", {}, title), keys, log ? h("span", { class: "dim" }, "log scale") : null, when), plot);
}

export function drawCharts(parent, state, chosenSpan) {
  const { samples, sample_ages_s: ages, slo } = state.cluster;
  const span = Math.min(chosenSpan, Math.max(60, Math.ceil((ages[0] ?? 0) / 60) * 60));
  const curve = (label, name) => ({ label, values: samples[name] ?? [] });
  const real = ["ttft", "tpot"].some(name => (samples[`rt_${name}_p50_s`] ?? []).some(value => value !== null));
  const any = ["ttft", "tpot"].some(name => (samples[`be_${name}_p50_s`] ?? []).some(value => value !== null));
  const of = any && !real ? "be" : "rt";
  const latency = (title, name) => ({ title: `${title} · ${of === "rt" ? "real-time" : "best-effort"}`, log: true, format: seconds,
    slo: of === "rt" ? slo[name] : undefined, curves: [curve("p50", `${of}_${name}_p50_s`), curve("p99", `${of}_${name}_p99_s`)] });
  const specs = [
    latency("TTFT", "ttft"), latency("TPOT", "tpot"),
    { title: "Tokens/s", format: rate, curves: [curve("output", "output_tokens_per_s"), curve("prompt", "prompt_tokens_per_s")] },
    { title: "Requests", format: count, curves: [curve("running", "requests_running"), curve("waiting", "requests_waiting")] },
    { title: "Requests/s", format: rate, curves: [curve("arrived", "arrivals_per_s"), curve("failed", "failed_per_s")] },
    { title: "KV", format: percent, most: 1, curves: [curve("in use", "kv_used"), curve("cached", "kv_cached")] }];
  redraw(parent, specs.map(spec => chart(spec, ages, span)));
}
