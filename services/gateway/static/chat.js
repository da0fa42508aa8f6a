// A conversation with the model through the API of the server that this page came from. Kept in memory only.
import { byId, h } from "./dom.js";
import { count, rate, seconds } from "./format.js";

const TRIES = ["Why is the sky blue?", "Write four lines about the sea."];
let turns = [], running = null, model = "";

const headers = () => {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", "x-cohort-class": byId("class").value,
    ...(key ? { Authorization: `Bearer ${key}` } : {}) };
};

async function findModel() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (!answer.ok) return void (byId("model").textContent = answer.status === 401 ? "asks for an API key" : "");
    model = (await answer.json()).data[0]?.id ?? "";
    byId("model").textContent = model;
  } catch {
    byId("model").textContent = "the gateway does not answer";
  }
}

function bubble(role, text, kind = "") {
  const words = document.createTextNode(text), meta = h("span", { class: "meta", hidden: true });
  const node = h("div", { class: `turn ${role} ${kind}` }, words, meta);
  byId("talk").append(node);
  byId("talk").scrollTop = byId("talk").scrollHeight;
  return { node, words, meta };
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

async function send(text) {
  if (running || !text.trim()) return;
  document.querySelector(".hello")?.remove();
  turns.push({ role: "user", content: text });
  bubble("user", text);
  const reply = bubble("assistant", "…", "waiting");
  busy(new AbortController());
  const began = performance.now();
  let said = "", first = null, usage = null, cohort = null, error = "";
  try {
    if (!model) await findModel();
    const answer = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({ model, messages: turns, stream: true, stream_options: { include_usage: true },
        max_tokens: Number(byId("tokens").value) || 256 }) });
    if (!answer.ok) throw new Error(await refusal(answer));
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      cohort = chunk.cohort ?? cohort;
      const piece = chunk.choices?.[0]?.delta?.content;
      if (!piece) continue;
      first ??= performance.now();
      said += piece;
      reply.node.classList.remove("waiting");
      reply.words.data = said;
      byId("talk").scrollTop = byId("talk").scrollHeight;
    }
  } catch (failure) {
    error = failure.name === "AbortError" ? "stopped" : failure.message;
  }
  finish(reply, { said, first, usage, cohort, error, began });
}

function finish(reply, { said, first, usage, cohort, error, began }) {
  const failed = error && error !== "stopped";
  reply.node.classList.toggle("error", Boolean(failed));
  reply.node.classList.remove("waiting");
  reply.words.data = said || (failed ? error : error ? "(stopped)" : "(nothing)");
  const tokens = usage?.completion_tokens, took = first === null ? 0 : (performance.now() - first) / 1000;
  reply.meta.textContent = [first === null ? "" : `first token after ${seconds((first - began) / 1000)}`,
    tokens ? `${count(tokens)} tokens` : "", tokens > 1 && took > 0 ? `${rate((tokens - 1) / took)} tokens/s` : "",
    cohort?.instances?.join(" → ") ?? "", cohort?.best_effort ? "served as best-effort" : "", said && error ? error : ""]
    .filter(Boolean).join(" · ");
  reply.meta.hidden = !reply.meta.textContent;
  if (said) turns.push({ role: "assistant", content: said });
  else turns.pop(); // what was not answered is no part of the conversation
  busy(null);
}

function busy(controller) {
  running = controller;
  byId("send").disabled = Boolean(controller);
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
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => { running?.abort(); turns = []; greet(); byId("words").focus(); });
byId("key").addEventListener("change", findModel);
greet();
findModel();
