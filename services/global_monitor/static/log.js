// What policies decided, and what became of processes.
import { h, redraw } from "./dom.js";
import { count, duration, seconds } from "./format.js";

const KINDS = { placed: "", split: "rt", bound: "", refused: "bad", demoted: "warn", lost: "bad", preempted: "warn",
  evicted: "warn", planned: "good" };
const EVENTS = { down: "bad", restarted: "warn", back: "good", appeared: "good", left: "dim" };
const tone = ({ kind, what }) => kind === "planned" && /^(failed|undone)/.test(what) ? "warn" : KINDS[kind] ?? "";
export const short = id => id.length > 12 ? id.slice(0, 10) + "…" : id;

export function drawDecisions(parent, state, ordinary, choose) {
  const shown = state.decisions.filter(({ decision }) => ordinary || decision.kind !== "placed");
  if (!shown.length) {
    redraw(parent, h("p", { class: "empty" }, ordinary
      ? "No decision yet." : "Nothing out of the ordinary was decided: no refusal, demotion, split, preemption or lost attempt."),
    refusals(state));
    return;
  }
  redraw(parent, h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "n" }, "ago"), h("th", {}, "decision"),
    h("th", {}, "request"), h("th", {}, "why"), h("th", { class: "roomy" }, "by"))),
  h("tbody", {}, shown.map(({ by, decision }) => {
    const pick = h("button", { type: "button", class: "id", title: decision.request_id,
      "data-key": `d:${decision.kind}:${decision.request_id}` }, short(decision.request_id));
    pick.addEventListener("click", () => choose(decision.request_id));
    const why = [decision.reason, decision.what, decision.forecast_s ? `TTFT predicted ${seconds(decision.forecast_s)}` : ""]
      .filter(Boolean).join(" · ") || (decision.instances ?? []).join(" → ");
    return h("tr", {}, h("td", { class: "n dim" }, duration(decision.age_s)),
      h("td", {}, h("span", { class: `chip ${tone(decision)}` }, decision.kind),
        (decision.count ?? 1) > 1 ? ` × ${count(decision.count)}` : ""),
      h("td", {}, decision.request_id ? pick : ""), h("td", { class: "wrap" }, why),
      h("td", { class: "dim roomy" }, by));
  }))), refusals(state));
}

/** All refusals of the last minute, also those at the gateway, which no process decided on. */
function refusals(state) {
  const found = Object.entries(state.cluster.last_minute.refused);
  return found.length ? h("p", { class: "warn" }, "Refused in the last minute: ",
    found.map(([reason, n]) => `${count(n)} ${reason.replaceAll("_", " ")}`).join(", "), ".") : null;
}

export function drawEvents(parent, state) {
  const events = state.cluster.events;
  if (!events.length) {
    redraw(parent, h("p", { class: "empty" }, "No process appeared, died or came back yet."));
    return;
  }
  redraw(parent, h("table", {}, h("tbody", {}, events.map(event => h("tr", {},
    h("td", { class: "n dim" }, duration(event.age_s) + " ago"), h("td", {}, h("b", {}, event.instance)),
    h("td", { class: EVENTS[event.what] ?? "" }, event.what))))));
}
