// The live page: opens the feed, keeps which request is chosen, hands each state to the parts.
import { byId, h, redraw } from "./dom.js";
import { duration } from "./format.js";
import { drawCharts } from "./charts.js";
import { drawTiles } from "./numbers.js";
import { drawDecisions, drawEvents } from "./log.js";
import { drawPipeline } from "./pipeline.js";
import { drawProcesses } from "./processes.js";
import { drawQueue } from "./queue.js";
import { drawLife, drawList } from "./requests.js";
import { drawSlo } from "./slo.js";
import { drawWorkers } from "./workers.js";

const STALE_MS = 5000;
let feed = null, state = null, heardMs = 0, paused = false, span = 300;
let chosen = new URLSearchParams(location.hash.slice(1)).get("request") ?? "";
let followed = false; // chosen by the page itself, because nobody chose

function choose(id) {
  chosen = id;
  followed = false;
  history.replaceState(null, "", id ? "#" + new URLSearchParams({ request: id }) : location.pathname);
  open();
  if (state) showSoon();
}

function open() {
  feed?.close();
  feed = null;
  if (paused || document.hidden) return;
  const mine = new EventSource("/api/live?" + new URLSearchParams({ history_s: span, ...(chosen ? { request: chosen } : {}) }));
  feed = mine;
  mine.addEventListener("message", event => {
    if (mine !== feed) return;
    state = JSON.parse(event.data);
    heardMs = Date.now();
    showSoon();
  });
  mine.addEventListener("error", () => { // after a refusal (503) the browser itself does not try again
    if (mine === feed && mine.readyState === EventSource.CLOSED) setTimeout(() => mine === feed && open(), 5000);
  });
}

/** Where drawing takes longer than updates come, the latest is drawn and those before it are not. */
let due = false;
function showSoon() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => { due = false; show(); });
}

function show() {
  const { cluster } = state;
  byId("what").textContent = `${cluster.model} · preset ${cluster.name} · monitor up ${duration(cluster.uptime_s)}`;
  const all = cluster.processes;
  const down = all.filter(process => process.status === "down");
  const late = all.filter(process => process.status === "up" && !process.ready);
  health(down.length ? `${down.length} down` : late.length ? `${late.length} not ready` : "all up",
    down.length ? "bad" : late.length ? "warn" : "good");
  document.title = (down.length ? `(${down.length} down) ` : "") + "Cohort";
  byId("link").textContent = "";
  chatLink(all);
  warnings(all);
  byId("h-figures").textContent = drawTiles(byId("tiles"), state);
  drawCharts(byId("charts"), state, span);
  drawPipeline(byId("pipeline"), state);
  drawQueue(byId("queue"), byId("queue-note"), state);
  drawSlo(byId("slo"), byId("slo-note"), state);
  drawWorkers(byId("workers"), state, chosen, choose);
  drawList(byId("list"), byId("list-note"), state, chosen, choose);
  drawLife(byId("life"), byId("life-note"), state, chosen);
  drawDecisions(byId("decisions"), state, byId("ordinary").checked, choose);
  drawEvents(byId("events"), state);
  drawProcesses(byId("processes"), state);
  if (!chosen && !followed && state.requests.length) { // one is shown, so that the page says what it can show
    followed = true;
    chosen = (state.requests.find(each => each.state === "finished") ?? state.requests[0]).request_id;
    open();
  }
}

function health(text, kind) {
  byId("health").className = `pill ${kind}`;
  byId("health").textContent = text;
}

function warnings(all) {
  const found = all.flatMap(process => process.warnings.map(text => [process.instance, text]));
  byId("warnings").hidden = !found.length;
  redraw(byId("warnings"), found.slice(0, 12).map(([name, text]) =>
    h("p", { class: "warning" }, h("b", { class: "warn" }, name), h("span", {}, text))));
}

function chatLink(all) {
  const gateway = all.find(process => process.role === "gateway" && process.status === "up" && process.metrics_url);
  const link = byId("chat");
  link.hidden = !gateway;
  if (!gateway) return;
  try {
    const url = new URL("/chat", gateway.metrics_url);
    if (url.protocol !== "http:" && url.protocol !== "https:") throw new Error("not for a browser");
    if (["127.0.0.1", "[::1]", "localhost"].includes(url.hostname)) url.hostname = location.hostname;
    if (link.href !== url.href) link.href = url.href;
  } catch {
    link.hidden = true;
  }
}

setInterval(() => {
  if (paused || document.hidden || Date.now() - heardMs < STALE_MS) return;
  health("no data", "bad");
  byId("link").textContent = heardMs
    ? `The monitor does not answer; this is ${duration((Date.now() - heardMs) / 1000)} old.`
    : "The monitor does not answer.";
}, 1000);

document.addEventListener("visibilitychange", open);
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Resume" : "Pause";
  byId("link").textContent = paused ? "paused" : "";
  open();
});
byId("find").addEventListener("submit", event => {
  event.preventDefault();
  const id = byId("find-id").value.trim();
  if (id) choose(id);
});
byId("spans").addEventListener("click", event => {
  if (!event.target.dataset.span) return;
  span = Number(event.target.dataset.span);
  for (const button of byId("spans").children) button.setAttribute("aria-pressed", String(button === event.target));
  open();
});
byId("ordinary").addEventListener("change", () => state && show());
let wide = 0;
new ResizeObserver(() => { // drawings are made for a width
  if (state && Math.abs(document.body.clientWidth - wide) > 4) { wide = document.body.clientWidth; showSoon(); }
}).observe(document.body);
open();
