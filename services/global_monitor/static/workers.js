// Each worker: the map of its KV blocks by class and owner, and the rows of its batch.
import { h, redraw } from "./dom.js";
import { bytes, count, percent, plural, seconds } from "./format.js";
import { short } from "./log.js";

const STATES = { free: "free", cached: "cached prefix", rt: "real-time", be: "best-effort", lent: "lent", settling: "settling" };
const PHASES = { awaiting_kv: "KV on its way", waiting: "waiting", prefill: "prefill", decode: "decode", swapped: "swapped out",
  parked: "parked", leaving: "leaving" };
const MOST_HEIGHT = 132, MOST_ROWS = 40;
const cards = new Map();

function makeCard(name, choose) {
  const card = { name, choose, head: h("div", { class: "head" }), facts: h("div", { class: "facts" }),
    drafts: h("div", { class: "facts", hidden: true }), canvas: h("canvas", { role: "img", height: 60 }), legend: h("div", { class: "legend" }),
    under: h("div", { class: "under" }), rows: h("div", { class: "scroll" }), cells: null, worker: null };
  card.node = h("section", { class: "card worker", "aria-label": `Worker ${name}` },
    card.head, card.facts, card.drafts, card.canvas, card.legend, card.under, card.rows);
  card.canvas.addEventListener("pointermove", event => hover(card, event));
  card.canvas.addEventListener("pointerleave", () => { card.under.textContent = card.idle ?? ""; });
  card.canvas.addEventListener("click", event => {
    const owner = ownerAt(card, event);
    if (owner) card.choose(owner.request_id);
  });
  return card;
}

function ownerAt(card, event) {
  const cell = cellAt(card, event);
  return cell === null ? null : card.worker.rows[card.cells.owners[cell]] ?? null;
}

function cellAt(card, event) {
  if (!card.cells) return null;
  const box = card.canvas.getBoundingClientRect(), { size, columns, states } = card.cells;
  const cell = Math.floor((event.clientY - box.top) / size) * columns + Math.floor((event.clientX - box.left) / size);
  return event.clientX - box.left < columns * size && cell >= 0 && cell < states.length ? cell : null;
}

function hover(card, event) {
  const cell = cellAt(card, event);
  if (cell === null) return;
  const { states, owners, names } = card.cells, per = card.worker.blocks.blocks_per_cell;
  const owner = card.worker.rows[owners[cell]];
  const which = per > 1 ? `blocks ${cell * per} to ${Math.min(card.worker.blocks.total, (cell + 1) * per) - 1}, mostly` : `block ${cell}:`;
  card.under.textContent = `${which} ${STATES[names[states[cell]]]}` +
    (owner ? `, of ${owner.request_id} (${PHASES[owner.phase]}, context ${count(owner.context)})` : "");
}

function unroll(blocks, names) {
  const states = [], owners = [];
  for (const [cells, state, row] of blocks.runs) for (let n = 0; n < cells; n++) { states.push(state); owners.push(row); }
  return { states, owners, names };
}

function paint(card, chosen) {
  const width = card.canvas.clientWidth, { states, owners, names } = card.cells;
  if (!width || !states.length) return;
  let size = Math.max(3, Math.min(14, Math.floor(Math.sqrt(width * MOST_HEIGHT / states.length))));
  while (size > 3 && Math.ceil(states.length / Math.floor(width / size)) * size > MOST_HEIGHT) size -= 1;
  const columns = Math.max(1, Math.floor(width / size)), ratio = Math.min(3, devicePixelRatio || 1);
  const height = Math.ceil(states.length / columns) * size;
  Object.assign(card.cells, { size, columns });
  card.canvas.width = width * ratio;
  card.canvas.height = height * ratio;
  card.canvas.style.height = `${height}px`;
  const style = getComputedStyle(document.documentElement), pen = card.canvas.getContext("2d");
  const colours = names.map(name => style.getPropertyValue(`--${name}`).trim());
  const mine = card.worker.rows.findIndex(row => row.request_id === chosen);
  const side = size - (size >= 5 ? 1 : size > 3 ? 0.6 : 0.4);
  pen.scale(ratio, ratio);
  states.forEach((state, cell) => {
    const owner = owners[cell];
    pen.fillStyle = colours[state];
    // Neighbouring owners differ a little, so that one can be told from the next.
    pen.globalAlpha = owner < 0 ? 1 : mine >= 0 ? (owner === mine ? 1 : 0.35) : [1, 0.68, 0.84][owner % 3];
    pen.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, side, side);
  });
}

function drawRows(card, chosen) {
  const { rows, sequences } = card.worker;
  if (!rows.length) {
    redraw(card.rows, h("p", { class: "empty" }, card.standby
      ? "Loaded and ready: no request was placed here in the last minute." : "No sequence is here."));
    return;
  }
  const head = h("thead", {}, h("tr", {}, ["request", "class", "phase"].map(name => h("th", {}, name)),
    ["age", "context"].map(name => h("th", { class: "n" }, name)), h("th", { class: "roomy" }, "growth"),
    h("th", { class: "n" }, "output"), h("th", { class: "n roomy" }, "blocks")));
  redraw(card.rows, h("table", {}, head, h("tbody", {}, rows.slice(0, MOST_ROWS).map(row => {
    const pick = h("button", { type: "button", class: "id", title: row.request_id, "data-key": `w:${card.name}:${row.request_id}` },
      short(row.request_id));
    pick.addEventListener("click", () => card.choose(row.request_id));
    const whole = Math.max(1, row.prompt_tokens + Math.max(row.predicted, row.known - row.prompt_tokens));
    const prompt = Math.min(row.context, row.prompt_tokens), output = Math.max(0, row.known - row.prompt_tokens);
    return h("tr", { class: row.request_id === chosen ? "chosen" : null }, h("td", {}, pick),
      h("td", {}, h("span", { class: `chip ${row.traffic_class}` }, row.traffic_class)),
      h("td", {}, PHASES[row.phase] ?? row.phase, row.scheduled > 1 ? h("span", { class: "dim" }, ` +${row.scheduled}`) : null,
        row.preemptions ? h("span", { class: "warn" }, ` ↩ ${row.preemptions}`) : null),
      h("td", { class: "n" }, seconds(row.age_s)), h("td", { class: "n" }, count(row.context)),
      h("td", { class: "roomy" }, h("span", { class: `growth ${row.traffic_class}`,
        title: `prompt ${row.prompt_tokens}, output ${output} of about ${Math.round(row.predicted)} predicted` },
      h("i", { class: "prompt", style: `width:${100 * prompt / whole}%` }),
      h("i", { style: `width:${100 * Math.max(0, row.context - row.prompt_tokens) / whole}%` }))),
      h("td", { class: "n" }, count(output)), h("td", { class: "n roomy" }, count(row.blocks)));
  }))), sequences > MOST_ROWS ? h("p", { class: "dim" }, `and ${count(sequences - Math.min(MOST_ROWS, rows.length))} more`) : null);
}

function drawDrafts(card) {
  const { drafts } = card.worker;
  card.drafts.hidden = !drafts.length;
  redraw(card.drafts, drafts.map(each => h("div", {}, h("span", { class: `chip ${each.traffic_class}` }, each.traffic_class),
    ` drafts: ${percent(each.acceptance)} right, ${each.tokens_a_step.toFixed(2)} tokens a step and row, ` +
    `${each.lately ? "lately" : "since its start"} · ${plural(each.rows, "row")} in all`)));
}

function update(card, worker, state, chosen) {
  card.worker = worker;
  const { blocks, iteration } = worker;
  const process = state.cluster.processes.find(each => each.instance === worker.instance);
  card.standby = !iteration && !worker.sequences && process?.ready && process.work && !process.work.step_ms
    && state.cluster.processes.some(each => each.work?.step_ms); // of a whole pipeline without work all are idle
  card.cells = unroll(blocks, state.block_states);
  redraw(card.head, h("b", {}, worker.instance), h("span", { class: "chip" }, worker.role),
    h("span", { class: "dim note" }, iteration
      ? "iteration: " + [iteration.decode_rows ? plural(iteration.decode_rows, "decode row") : "", iteration.prefill_rows
        ? `${plural(iteration.prefill_rows, "prompt")} with ${count(iteration.prefill_tokens)} tokens` : ""].filter(Boolean).join(", ")
      : card.standby ? "warm standby" : "idle"));
  card.facts.textContent = [plural(worker.sequences, "sequence"),
    process?.work?.step_ms ? `iterations of ${seconds(process.work.step_ms / 1000)}` : "",
    `${count(blocks.total)} blocks of ${blocks.block_size} tokens`,
    blocks.host_total ? `host ${count(blocks.host_total - blocks.host_free)} of ${count(blocks.host_total)}` : "",
    worker.kv_sent_per_s ? `sends ${bytes(worker.kv_sent_per_s)}/s` : "",
    worker.kv_received_per_s ? `receives ${bytes(worker.kv_received_per_s)}/s` : ""].filter(Boolean).join(" · ");
  drawDrafts(card);
  const shares = state.block_states.filter(name => blocks.counts[name] || name === "free" || name === "rt" || name === "be" || name === "cached");
  redraw(card.legend, shares.map(name => h("span", {}, h("i", { style: `background:var(--${name})` }),
    `${STATES[name]} ${count(blocks.counts[name] ?? 0)}`)));
  card.canvas.setAttribute("aria-label", "KV blocks: " + shares.map(name => `${STATES[name]} ${blocks.counts[name] ?? 0}`).join(", "));
  card.idle = blocks.blocks_per_cell > 1 ? `a cell is ${blocks.blocks_per_cell} blocks; ` +
    `${percent(1 - (blocks.counts.free ?? 0) / Math.max(1, blocks.total))} not free` : "";
  if (!card.canvas.matches(":hover")) card.under.textContent = card.idle;
  drawRows(card, chosen);
}

const along = worker => `${worker.role === "decode" ? 1 : 0}${worker.instance}`; // a request's way: prefill first

export function drawWorkers(parent, state, chosen, choose) {
  const names = [...state.workers].sort((a, b) => along(a) < along(b) ? -1 : 1).map(worker => worker.instance);
  for (const name of cards.keys()) if (!names.includes(name)) cards.delete(name);
  for (const name of names) if (!cards.has(name)) cards.set(name, makeCard(name, choose));
  const nodes = names.map(name => cards.get(name).node);
  if (!names.length) redraw(parent, h("p", { class: "card empty" }, "No worker shows itself: none is up, or it is loading the model."));
  else if (nodes.length !== parent.children.length || nodes.some((node, n) => parent.children[n] !== node)) parent.replaceChildren(...nodes);
  for (const worker of state.workers) {
    const card = cards.get(worker.instance);
    update(card, worker, state, chosen);
    paint(card, chosen);
  }
}
