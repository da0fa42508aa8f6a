// Who waits at the manager: in buckets of prompt length, where its order has them, and by class.
import { h, redraw } from "./dom.js";
import { count, plural, seconds } from "./format.js";

const MOST_COLUMNS = 16;
const NAMES = { rt: "real-time", be: "best-effort" };

/** Neighbours together, so that there are few enough to read; bounds stay bounds of buckets. */
function grouped(buckets) {
  const size = Math.ceil(buckets.length / MOST_COLUMNS);
  const groups = [];
  for (let first = 0; first < buckets.length; first += size) {
    const part = buckets.slice(first, first + size);
    groups.push([part[0][0], part.at(-1)[1], part.reduce((sum, bucket) => sum + bucket[2], 0)]);
  }
  return groups;
}

function columns(buckets) {
  const groups = grouped(buckets), most = Math.max(1, ...groups.map(group => group[2]));
  return h("div", { class: "columns", role: "list", "aria-label": "Buckets by prompt tokens" },
    groups.map(([low, high, waiting]) => h("div", { class: "column", role: "listitem",
      title: `${low} to ${high - 1} prompt tokens: ${plural(waiting, "request")}` },
    h("b", {}, waiting ? count(waiting) : ""),
    h("i", { class: waiting ? "" : "none", style: `height:${Math.round(100 * waiting / most)}px` }),
    h("span", {}, `< ${count(high)}`))));
}

export function drawQueue(parent, note, state) {
  const queue = state.queue;
  if (!queue) {
    note.textContent = "";
    redraw(parent, h("p", { class: "empty" }, "The manager does not say what waits; it may be starting."));
    return;
  }
  const waiting = queue.classes.reduce((sum, each) => sum + each.requests, 0);
  note.textContent = `order ${queue.order} · ${waiting ? plural(waiting, "request") + " waiting" : "empty"}`;
  const most = Math.max(1, ...queue.classes.map(each => each.requests));
  const byClass = h("div", { class: "bars" }, queue.classes.map(each => [
    h("span", { class: `chip ${each.traffic_class}` }, NAMES[each.traffic_class] + (each.online ? "" : ", batch")),
    h("div", { class: "track" },
      h("i", { class: each.traffic_class, style: `width:${100 * each.requests / most}%` })),
    h("span", { class: "value" }, `${count(each.requests)} · ${count(each.tokens)} tokens · oldest ${seconds(each.oldest_s)}`),
  ]));
  const split = queue.buckets.length > 1, most_tokens = queue.buckets.at(-1)?.[1];
  const range = queue.buckets.length && !(split && waiting) ? [h("p", { class: "dim" }, split
    ? `${plural(queue.buckets.length, "bucket")} of prompts up to ${count(most_tokens)} tokens, all empty.`
    : `One bucket of prompts up to ${count(most_tokens)} tokens; a long queue splits it.`)] : [];
  const buckets = split && waiting ? [
    h("p", { class: "dim" }, `${plural(queue.buckets.length, "bucket")} by prompt tokens`), columns(queue.buckets),
    h("hr", { class: "split-line" })] : [];
  redraw(parent, range, buckets, waiting ? byClass : h("p", { class: "empty" },
    "No request waits at the manager: each was placed on a worker as it came."));
}
