// Sends the requests that are tried on the page of the API, and shows their answers as text.
import { byId } from "./dom.js";

const LONGEST = 200_000; // characters of an answer that are shown

function opened() {
  const at = byId(location.hash.slice(1));
  if (at?.tagName === "DETAILS") at.open = true;
}

async function send(form) {
  const output = form.querySelector("output"), began = performance.now();
  const headers = {}, query = new URLSearchParams(), file = new FormData();
  let path = form.dataset.path, body = form.elements.body?.value;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (byId("key")?.value) headers.Authorization = `Bearer ${byId("key").value.trim()}`;
  for (const field of form.querySelectorAll("[data-in]")) {
    const { name, value } = field;
    if (field.dataset.in === "path") path = path.replace(`{${name}}`, encodeURIComponent(value));
    else if (!value) continue;
    else if (field.dataset.in === "query") query.append(name, value);
    else if (field.dataset.in === "header") headers[name] = value;
    else file.append(name, field.files?.[0] ?? value);
    if (field.dataset.in === "form") body = file;
  }
  const told = (text, bad) => { output.textContent = text.slice(0, LONGEST); output.classList.toggle("bad", bad); };
  told("…", false);
  try {
    const answer = await fetch(path + (query.size ? `?${query}` : ""), { method: form.dataset.method.toUpperCase(), headers, body });
    const head = () => `${answer.status} ${answer.statusText}, ${(performance.now() - began).toFixed(0)} ms\n\n`;
    const reader = answer.body?.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part; reader && !(part = await reader.read()).done;) {
      text += part.value;
      if (answer.headers.get("Content-Type")?.startsWith("text/event-stream")) told(head() + text, false);
    }
    if (answer.headers.get("Content-Type")?.startsWith("application/json")) text = JSON.stringify(JSON.parse(text), null, 2);
    told(head() + text, !answer.ok);
  } catch (failure) {
    told(failure.message, true);
  }
}

document.addEventListener("submit", async event => {
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  await send(event.target);
  button.disabled = false;
});
addEventListener("hashchange", opened);
opened();
