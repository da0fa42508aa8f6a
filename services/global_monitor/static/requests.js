// The latest requests, and the life of the one that is chosen.
import { h, redraw, s } from "./dom.js";
import { count, duration, plural, seconds } from "./format.js";
import { short } from "./log.js";

const STATES = { open: "", waiting: "warn", placed: "", running: "rt", finished: "good", failed: "bad", cancelled: "", refused: "bad" };
const STAGES = [["tokenize", "tokenise"], ["predict", "predict"], ["bucket", "queue at the manager"],
  ["prefill_queue", "prefill queue"], ["prefill", "prefill"], ["transfer", "KV transfer"], ["first_decode", "first decode"]];
const OBJECTIVES = { ttft: "first token", tpot: "each token", deadline: "whole response" };
const PARTS = [["queue_s", "queue", "var(--s4)"], ["prefill_s", "prefill", "var(--s5)"],
  ["transfer_s", "KV transfer", "var(--s6)"], ["decode_s", "decode", "var(--s7)"]];

export function drawList(parent, note, state, chosen, choose) {
  note.textContent = state.requests.length ? `${plural(state.open_requests, "open request")}` : "";
  if (!state.requests.length) {
    redraw(parent, h("p", { class: "empty" }, "No request since the gateway's start. The button Chat sends one, and so does ",
      h("code", {}, "cohort bench"), " or any client of the API."));
    return;
  }
  redraw(parent, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "request"), h("th", {}, "class"), h("th", {}, "state"),
    h("th", { class: "n" }, "prompt"), h("th", { class: "n" }, "output"), h("th", { class: "n" }, "TTFT"),
    h("th", { class: "roomy" }, "workers"), h("th", { class: "n roomy" }, "ago"))),
  h("tbody", {}, state.requests.map(each => {
    const pick = h("button", { type: "button", class: "id", title: each.request_id, "data-key": `r:${each.request_id}`,
      "aria-pressed": String(each.request_id === chosen) }, short(each.request_id));
    pick.addEventListener("click", () => choose(each.request_id));
    return h("tr", { class: each.request_id === chosen ? "chosen" : null }, h("td", {}, pick),
      h("td", {}, h("span", { class: `chip ${each.traffic_class}` }, each.traffic_class)),
      h("td", {}, h("span", { class: `chip ${STATES[each.state] ?? ""}` }, each.state),
        each.missed ? h("span", { class: "bad", title: "an SLO was missed" }, " SLO") : null,
        each.attempts > 1 ? h("span", { class: "warn", title: "attempts" }, ` × ${each.attempts}`) : null),
      h("td", { class: "n" }, count(each.prompt_tokens)), h("td", { class: "n" }, count(each.output_tokens)),
      h("td", { class: "n" }, seconds(each.ttft_s)), h("td", { class: "dim roomy cut", title: each.instances.join(" → ") }, each.instances.join(" → ")),
      h("td", { class: "n dim roomy" }, duration(each.age_s)));
  }))));
}

/** Parts along a line from 0 to `whole` seconds: [start, length, colour, name]. */
function lane(title, whole, parts, marks = []) {
  const width = 1000, height = 40, x = at => width * Math.min(1, Math.max(0, at / (whole || 1)));
  const ticks = [0, .25, .5, .75, 1];
  return h("div", { class: "lane" }, h("div", { class: "lane-head" }, h("b", {}, title), h("span", {}, seconds(whole))),
    s("svg", { viewBox: `0 0 ${width} ${height - 14}`, preserveAspectRatio: "none", style: "height:26px", role: "img",
      "aria-label": `${title}: ` + parts.map(([, length, , name]) => `${name} ${seconds(length)}`).join(", ") },
    s("rect", { x: 0, y: 4, width, height: 16, rx: 2, style: "fill:var(--free)" }),
    parts.filter(part => part[1] > 0).map(([start, length, colour, name]) =>
      s("rect", { x: x(start), y: 4, width: Math.max(1.5, x(start + length) - x(start)), height: 16, style: `fill:${colour}` },
        s("title", {}, `${name}: ${seconds(length)}`))),
    marks.map(([at, colour, name]) => s("rect", { x: x(at) - 1.5, y: 0, width: 3, height: 24, style: `fill:${colour}` },
      s("title", {}, name))),
    ticks.map(t => s("rect", { x: Math.min(width - 1, width * t), y: 22, width: 1, height: 4, style: "fill:var(--strong-line)" }))));
}

/** Of a request without a token: how far it has come, from the moments that are known. */
function wayOf(life, end) {
  const at = what => life.moments.findLast(([, name]) => name === what)?.[0];
  const submitted = at("submitted"), placed = at("placed");
  const ends = [[submitted, "tokenise and predict", "var(--s2)"], [placed, "queue at the manager", "var(--s3)"],
    [end, placed === undefined ? "waiting" : "on a worker, no token yet", "var(--s4)"]];
  let from = 0;
  return ends.filter(([until]) => until !== undefined).map(([until, name, colour]) => {
    const part = [from, Math.max(0, until - from), colour, name];
    from = until;
    return part;
  });
}

function stagesOf(life) {
  let at = 0;
  return STAGES.map(([name, label], n) => {
    const length = life.stages[name] ?? 0, part = [at, length, `var(--s${n + 1})`, label];
    at += length;
    return part;
  });
}

function happenings(life, state) {
  const own = life.moments.map(([at, what, where, why]) => ({ at, what, where, why }));
  const later = state.decisions // what workers and the manager did with it since: theirs are ages, as is this one
    .filter(({ decision }) => decision.request_id === life.request_id && !["placed", "split"].includes(decision.kind))
    .map(({ by, decision }) => ({ at: life.age_s - decision.age_s, what: decision.kind, where: by,
      why: [decision.reason, decision.what].filter(Boolean).join(" · ") }));
  const all = [{ at: 0, what: "arrived", where: "gateway", why: "" }, ...own, ...later];
  if (life.ended_s !== null) all.push({ at: life.ended_s, what: life.state, where: "gateway", why: life.reason });
  return all.sort((a, b) => a.at - b.at);
}

function facts(life) {
  const slo = Object.entries(life.outcomes).map(([name, met]) =>
    h("span", { class: `chip ${met ? "good" : "bad"}` }, `${OBJECTIVES[name] ?? name} ${met ? "met" : "missed"}`));
  const fact = (label, value) => h("span", {}, h("span", { class: "dim" }, label + " "), h("b", {}, value));
  return h("div", { class: "life-facts" }, h("span", { class: `chip ${STATES[life.state] ?? ""}` }, life.state),
    h("span", { class: `chip ${life.traffic_class}` }, life.traffic_class), life.best_effort ? h("span", { class: "chip warn" }, "demoted") : null,
    slo, fact("prompt", count(life.prompt_tokens)), life.cached_tokens ? fact("cached", count(life.cached_tokens)) : null,
    fact("output", `${count(life.output_tokens)} of at most ${count(life.max_tokens)}`),
    life.predicted ? fact("predicted", count(Math.round(life.predicted))) : null,
    life.slo.ttft_s ? fact("TTFT SLO", seconds(life.slo.ttft_s)) : null,
    life.attempts > 1 ? fact("attempts", count(life.attempts)) : null);
}

function onWorkers(life) {
  if (!life.times.length) return null;
  const whole = Math.max(...life.times.map(each => PARTS.reduce((sum, [name]) => sum + each[name], 0)), 1e-9);
  return life.times.map(each => {
    let at = 0;
    const parts = PARTS.map(([name, label, colour]) => { const part = [at, each[name], colour, label]; at += each[name]; return part; });
    const words = PARTS.filter(([name]) => each[name] > 0).map(([name, label]) => `${label} ${seconds(each[name])}`);
    if (each.preemptions) words.push(plural(each.preemptions, "preemption"));
    return h("div", {}, lane(each.instance, whole, parts), h("p", { class: "dim under" }, words.join(" · ")));
  });
}

export function drawLife(parent, note, state, chosen) {
  const life = state.life;
  note.textContent = life ? life.request_id : "";
  if (!life || life.request_id !== chosen) {
    redraw(parent, h("p", { class: "empty" }, chosen
      ? "Asking for this request. The gateway remembers open requests and the 512 that ended last."
      : "Choose a request from the list, a row of a worker, a block of its map, or enter an id."));
    if (chosen) note.textContent = chosen;
    return;
  }
  const end = life.ended_s ?? life.age_s, first = life.first_token_s, stages = stagesOf(life);
  const all = happenings(life, state);
  const marks = all.filter(each => ["lost", "preempted", "evicted", "bound", "first token from"].includes(each.what))
    .map(each => [each.at, each.what === "lost" ? "var(--bad)" : each.what === "first token from" ? "var(--text)" : "var(--warn)",
      `${each.what} ${each.where} at ${seconds(each.at)}`]);
  const decode = first === null ? [] : [[first, (life.last_token_s ?? end) - first, "var(--s7)", "decode"]];
  redraw(parent, facts(life),
    lane(life.ended_s === null ? "Life so far" : "Whole life", end, first === null ? wayOf(life, end) : [...stages, ...decode], marks),
    first === null ? h("div", { class: "stages" }, wayOf(life, end).map(([, length, colour, name]) =>
      h("div", {}, h("i", { style: `background:${colour}` }), name, h("b", {}, seconds(length))))) : [lane("To the first token", first, stages),
      h("div", { class: "stages" }, stages.map(([, length, colour, name]) =>
        h("div", {}, h("i", { style: `background:${colour}` }), name, h("b", {}, seconds(length)))))],
    life.times.length > 1 ? onWorkers(life) : null,
    h("ol", { class: "moments" }, all.map(each => h("li", {}, h("time", {}, "+ " + seconds(each.at)),
      h("span", {}, h("b", {}, each.what), each.where ? ` ${each.where} ` : " ", h("span", { class: "why" }, each.why))))));
}
