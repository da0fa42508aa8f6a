// A conversation with the model through the API of the server that this page came from. A reload keeps it, a new tab
// begins another one.
import { byId, h } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { copyButton, markdown } from "./markdown.js";

const TRIES = ["What is the capital of Japan?", "Write four lines about the sea."];
const KEPT = ["system", "temperature", "tokens", "class"];
let turns = [], running = null;

const headers = () => {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", "x-cohort-class": byId("class").value,
    ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

async function findModels() {
  const chosen = byId("model").value;
  let names = [], why = "";
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (answer.ok) names = (await answer.json()).data.map(each => each.id);
    else why = answer.status === 401 ? "asks for an API key" : `HTTP ${answer.status}`;
  } catch {
    why = "the gateway does not answer";
  }
  byId("model").replaceChildren(...names.map(name => h("option", { selected: name === chosen }, name)),
    ...(why ? [h("option", { value: "" }, why)] : []));
  byId("model").disabled = names.length < 2;
}

/** Put the turn on the page. Returns what draws an answer anew as it grows. */
function show(turn) {
  const talk = byId("talk"), node = h("article", { class: `turn ${turn.role}` });
  talk.querySelector(".hello")?.remove();
  talk.append(node);
  talk.scrollTop = talk.scrollHeight;
  if (turn.role === "user") return void node.append(turn.content);
  const summary = h("summary"), thoughts = h("div", { class: "plain" }), folded = h("details", {}, summary, thoughts);
  const said = h("div", { class: "said" }), problem = h("p", { class: "problem" }), meta = h("span");
  const foot = h("footer", {}, meta, copyButton(() => turn.content));
  node.append(folded, said, problem, foot);
  return () => {
    const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80, going = !turn.meta && !turn.error;
    node.ariaBusy = String(going);
    node.classList.toggle("waiting", going && !turn.content && !turn.reasoning);
    folded.hidden = !turn.reasoning;
    summary.textContent = turn.content || !going ? "Reasoning" : "Reasoning …";
    if (thoughts.textContent !== turn.reasoning) thoughts.textContent = turn.reasoning;
    replace(said, turn.content ? markdown(turn.content) : []);
    problem.hidden = !turn.error;
    problem.textContent = turn.error;
    foot.hidden = !turn.meta;
    meta.textContent = turn.meta;
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  };
}

/** Put new children in place of old ones, but leave those that are the same: what is selected in them stays so. */
function replace(parent, children) {
  children.forEach((child, index) => {
    const old = parent.children[index];
    if (!old) parent.append(child);
    else if (!old.isEqualNode(child)) old.replaceWith(child);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

function greet() {
  const tries = TRIES.map(text => {
    const button = h("button", { type: "button" }, text);
    button.addEventListener("click", () => send(text));
    return button;
  });
  byId("talk").replaceChildren(h("div", { class: "hello" }, h("b", {}, "Try the model"),
    "What you write is sent to this server's chat completions, as any client would.", h("div", {}, tries)));
}

function keep() {
  const settings = Object.fromEntries(KEPT.map(id => [id, byId(id).value]));
  try { sessionStorage.setItem("chat", JSON.stringify({ turns, settings })); } catch { /* full, or forbidden */ }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("chat")) ?? {};
    for (const [id, value] of Object.entries(kept.settings ?? {})) byId(id).value = value;
    turns = kept.turns ?? [];
  } catch { turns = []; }
  if (turns.at(-1)?.content === "") turns.splice(-2); // left before its answer began
  if (!turns.length) greet();
  for (const turn of turns) show({ ...turn, meta: turn.meta || (turn.error ? "" : "interrupted") })?.();
}

/** The data of server-sent events, as they come. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts)
      for (const line of part.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

async function refusal(answer) {
  let why = `HTTP ${answer.status}`;
  try { why = (await answer.json()).error?.message ?? why; } catch { /* no JSON: the status says it */ }
  const after = answer.headers.get("Retry-After");
  return after ? `${why} (again in ${after} s)` : why;
}

function asked() {
  const system = byId("system").value.trim(), messages = turns.slice(0, -1).map(({ role, content }) => ({ role, content }));
  const body = { model: byId("model").value, stream: true, stream_options: { include_usage: true },
    messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  for (const [field, id] of [["temperature", "temperature"], ["max_tokens", "tokens"]])
    if (byId(id).value !== "") body[field] = Number(byId(id).value);
  return JSON.stringify(body);
}

async function send(text) {
  if (running || !text.trim()) return;
  const turn = { role: "assistant", content: "", reasoning: "", meta: "", error: "" };
  turns.push({ role: "user", content: text }, turn);
  show(turns.at(-2));
  const draw = show(turn);
  draw();
  busy(new AbortController());
  const { signal } = running, began = performance.now(), talk = turns;
  let first = null, usage = null, request = null, reason = "", frame = 0;
  try {
    if (!byId("model").value) await findModels();
    const answer = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), signal, body: asked() });
    if (!answer.ok) throw new Error(await refusal(answer));
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data), choice = chunk.choices?.[0];
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      request = chunk.cohort?.requests[0] ?? request;
      reason = choice?.finish_reason ?? reason;
      if (!choice?.delta.content && !choice?.delta.reasoning_content) continue;
      first ??= performance.now();
      turn.content += choice.delta.content ?? "";
      turn.reasoning += choice.delta.reasoning_content ?? "";
      frame ||= requestAnimationFrame(() => { frame = 0; draw(); });
    }
  } catch (failure) {
    if (!signal.aborted) turn.error = failure.message;
  }
  const tokens = usage?.completion_tokens, took = (performance.now() - first) / 1000;
  turn.meta = [first === null ? "" : `first token after ${seconds((first - began) / 1000)}`, tokens ? `${count(tokens)} tokens` : "",
    tokens > 1 ? `${rate((tokens - 1) / took)} tokens/s` : "", request?.instances.join(" → "),
    request?.best_effort ? "served as best effort" : "", reason === "length" ? "cut off at the most tokens" : "",
    signal.aborted ? signal.reason : ""]
    .filter(Boolean).join(" · ");
  if (!turn.content && !turn.error && !signal.aborted)
    turn.error = turn.reasoning ? "There was no answer after the reasoning." : "The answer is empty.";
  draw();
  if (talk !== turns) return; // another chat was begun meanwhile
  if (!turn.content) { // what was not answered is no part of the conversation
    turns.splice(-2);
    byId("words").value ||= text;
  }
  busy(null);
  keep();
}

function busy(controller) {
  running = controller;
  byId("send").hidden = Boolean(controller);
  byId("stop").hidden = !controller;
}

byId("say").addEventListener("submit", event => {
  event.preventDefault();
  const text = byId("words").value;
  if (running || !text.trim()) return;
  byId("words").value = "";
  send(text);
});
byId("words").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("say").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort("stopped"));
byId("clear").addEventListener("click", () => {
  running?.abort();
  busy(null);
  turns = [];
  keep();
  greet();
  byId("words").focus();
});
byId("key").addEventListener("change", findModels);
byId("settings").addEventListener("change", keep);
addEventListener("pagehide", () => {
  running?.abort("interrupted");
  keep();
});
restore();
findModels();
