// The tiles on top: figures of the last minute, and what runs now.
import { h, redraw } from "./dom.js";
import { count, percent, plural, rate, seconds } from "./format.js";

function tile(label, value, unit = "", more = "", kind = "") {
  return h("div", { class: "card tile" }, h("div", { class: "label" }, label),
    h("b", { class: kind }, value, unit ? h("small", {}, unit) : null), h("div", { class: "more", title: more }, more));
}

export function drawTiles(parent, state) {
  const { last_minute: figures, processes, arrival_rate_forecast: soon } = state.cluster;
  const up = processes.filter(process => process.status === "up");
  const sum = (name, role = "") => up.filter(process => !role || process.role === role)
    .reduce((total, process) => total + (process.stats[name] ?? 0), 0);
  const { rt, be } = figures.classes;
  const [chip, of] = rt.ttft.p50_s === null && be.ttft.p50_s !== null ? ["be", be] : ["rt", rt];
  const latency = (label, { p50_s, p99_s }) => tile(`${label} p50 · ${chip}`, seconds(p50_s), "", `p99 ${seconds(p99_s)}`);
  const refused = Object.entries(figures.refused), blocks = sum("kv_total_blocks");
  redraw(parent,
    latency("TTFT", of.ttft), latency("TPOT", of.tpot), latency("Token gap", of.itl),
    tile("Output", rate(figures.output_tokens_per_s), "tok/s", `prompts ${rate(figures.prompt_tokens_per_s)}`),
    tile("Arrivals", rate(figures.arrivals_per_s), "req/s", `forecast ${rate(soon)} · done ${rate(figures.finished_per_s)}`),
    tile("Running now", count(sum("requests_running", "gateway")), "", `${count(sum("requests_waiting", "gateway"))} waiting`),
    tile("KV in use now", percent(blocks ? sum("kv_used_blocks") / blocks : NaN), "",
      `${percent(blocks ? sum("kv_cached_blocks") / blocks : NaN)} cached`),
    tile("Failed", count(figures.failed), "", refused.length
      ? "refused: " + refused.map(([reason, n]) => `${count(n)} ${reason.replaceAll("_", " ")}`).join(", ") : "none refused",
    figures.failed ? "bad" : ""));
  return `Last ${plural(Math.round(figures.seconds), "second")}`;
}
