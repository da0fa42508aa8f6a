// Every process with all it reports.
import { h, redraw } from "./dom.js";
import { bytes, duration, generic } from "./format.js";

const opened = new Set();

/** `several`: there are several managers. */
function card(process, several) {
  const { stats, status } = process;
  const colour = status === "down" ? "bad" : status === "left" ? "dim" : process.ready ? "good" : "warn";
  const part = status !== "up" || process.role !== "bucketing_manager" ? "" : stats.leads ? ", leads" : ", stands by";
  const word = (status === "up" ? (process.ready ? "ready" : "not ready") : status) + (several ? part : "");
  const facts = process.facts ?? {};
  const about = [facts.device, facts.capability ? `sm ${facts.capability}` : "", facts.dtype, facts.kernels];
  const names = Object.keys(stats).sort();
  const key = `p:${process.instance}`;
  const details = h("details", { open: opened.has(process.instance) }, h("summary", { "data-key": key }, `${names.length} stats`),
    opened.has(process.instance) ? h("dl", {}, names.map(name =>
      [h("dt", { title: name }, name), h("dd", {}, generic(name, stats[name]))])) : null);
  details.addEventListener("toggle", () => {
    opened[details.open ? "add" : "delete"](process.instance);
    if (details.open && !details.querySelector("dl")) details.append(h("dl", {}, names.map(name =>
      [h("dt", { title: name }, name), h("dd", {}, generic(name, stats[name]))])));
  });
  return h("article", { class: `card process ${status}` },
    h("div", { class: "line" }, h("b", {}, process.instance), h("span", { class: colour }, word)),
    h("div", { class: "sub" }, [process.role.replaceAll("_", " "), `pid ${process.pid}`,
      stats.rss_bytes ? bytes(stats.rss_bytes) : "",
      status === "up" ? `up ${duration(process.since_s)}` : `${status} ${duration(process.since_s)} ago`,
      process.restarts ? `restarts: ${process.restarts}` : ""].filter(Boolean).join(" · ")),
    about.some(Boolean) ? h("div", { class: "sub" }, about.filter(Boolean).join(" · ")) : null, details);
}

export function drawProcesses(parent, state) {
  const several = state.cluster.processes.filter(process => process.role === "bucketing_manager").length > 1;
  const more = state.processes - state.cluster.processes.length;
  redraw(parent, state.cluster.processes.map(each => card(each, several)), more > 0 ? h("p", { class: "dim" }, `and ${more} further processes`) : null);
}
