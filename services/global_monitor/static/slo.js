// SLO attainment by class and objective; by API key, where the gateway counts it so.
import { h, redraw } from "./dom.js";
import { count, percent, plural } from "./format.js";

const OBJECTIVES = { ttft: "first token", tpot: "each token", deadline: "whole response" };
const NAMES = { rt: "real-time", be: "best-effort" };
const MOST_KEYS = 24;

const kind = share => share >= 0.99 ? "good" : share >= 0.9 ? "warn" : "bad";

function line(label, met, missed, behind) {
  const judged = met + missed, share = judged ? met / judged : NaN;
  return [label,
    h("div", { class: "track", role: "img", "aria-label": judged ? `${percent(share)} met` : "none judged" },
      judged ? h("i", { class: kind(share), style: `width:${100 * share}%` }) : null),
    h("span", { class: "value" }, h("b", { class: judged ? kind(share) : "dim" }, judged ? percent(share) : "–"),
      h("span", { class: "dim" }, ` ${behind}`))];
}

export function drawSlo(parent, note, state) {
  const all = state.slo.filter(each => !each.key), keys = state.slo.filter(each => each.key);
  note.textContent = all.length ? "of the last minute" : "";
  if (!all.length) {
    redraw(parent, h("p", { class: "empty" },
      "No request with an SLO has finished since the gateway's start. Real-time requests get the default one; a request names its own in ",
      h("code", {}, "cohort.ttft_slo_ms"), " and ", h("code", {}, "cohort.tpot_slo_ms"), "."));
    return;
  }
  const rows = all.map(each => {
    const [met, missed] = state.cluster.last_minute.classes[each.traffic_class]?.slo[each.objective] ?? [0, 0];
    const judged = each.met + each.missed;
    return line(h("span", {}, h("span", { class: `chip ${each.traffic_class}` }, NAMES[each.traffic_class] ?? each.traffic_class), " ",
      OBJECTIVES[each.objective] ?? each.objective), met, missed,
    `of ${count(met + missed)} · since start ${percent(each.met / judged)} of ${count(judged)}`);
  });
  const byKey = keys.length ? [h("hr", { class: "split-line" }),
    h("div", { class: "bars", "aria-label": "By API key" }, keys.slice(0, MOST_KEYS).map(each => line(
      h("span", {}, h("b", {}, each.key), " ", `${each.traffic_class} ${OBJECTIVES[each.objective] ?? each.objective}`),
      each.met, each.missed, `of ${count(each.met + each.missed)}`))),
    keys.length > MOST_KEYS ? h("p", { class: "dim" }, `and ${plural(keys.length - MOST_KEYS, "further one")}`) : null] : [];
  redraw(parent, h("div", { class: "bars" }, rows), byKey);
}
