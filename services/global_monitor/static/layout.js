// Where the nodes of the pipeline's picture lie and how its edges run: one layout for wide screens, one for phones.
const MOST_IN_COLUMN = 5;
const GAP = 14;

const middle = box => box.y + box.h / 2;
const right = box => box.x + box.w;
const bottom = box => box.y + box.h;
const centre = box => box.x + box.w / 2;
const curve = (x1, y1, x2, y2) => {
  const mid = (x1 + x2) / 2;
  return `M${x1},${y1} C${mid},${y1} ${mid},${y2} ${x2},${y2}`;
};
const column = (x, y, w, h, n) => Array.from({ length: Math.min(n, MOST_IN_COLUMN) }, (_, i) => ({ x, y: y + i * (h + GAP), w, h }));
const tall = (n, h) => Math.max(0, Math.min(n, MOST_IN_COLUMN) * (h + GAP) - GAP);

/** Prefill workers before decode workers; where there is one kind only, it has the column. */
export function wide(width, prefills, decodes) {
  const both = prefills > 0 && decodes > 0;
  const h = 86, top = 100, small = 54;
  const clientW = 84, columns = both ? 4 : 3;
  const space = Math.max(60, Math.min(190, (width - clientW) / columns - 172));
  const w = Math.min(236, (width - clientW - columns * space) / columns);
  const x = n => clientW + space + n * (w + space);
  const main = Math.max(h, tall(prefills, h), tall(decodes, h));
  const mid = top + main / 2;
  const client = { x: 0, y: mid - 22, w: clientW, h: 44 };
  const gateway = { x: x(0), y: mid - h / 2, w, h }, manager = { x: x(1), y: mid - h / 2, w, h };
  const predictor = { x: x(0), y: 4, w, h: small }, monitor = { x: x(1), y: 4, w, h: small };
  const prefill = column(x(2), mid - tall(prefills, h) / 2, w, h, prefills);
  const decode = column(x(both ? 3 : 2), mid - tall(decodes, h) / 2, w, h, decodes);
  const workers = [...prefill, ...decode], first = prefill.length ? prefill : decode;
  const low = top + main + 34;
  const behind = both ? decode : [];
  const over = first.length ? first[0].y - 20 : mid;
  return {
    height: low + 16,
    box: { client, gateway, manager, predictor, monitor, prefill, decode },
    paths: {
      arrive: `M${right(client)},${mid - 8} H${gateway.x}`,
      answer: `M${gateway.x},${mid + 12} H${right(client)}`,
      predict: `M${centre(gateway)},${gateway.y} V${bottom(predictor)}`,
      submit: `M${right(gateway)},${mid} H${manager.x}`,
      place: [...first.map((to, n) => ({ to: prefill.length ? "prefill" : "decode", n, d: curve(right(manager), mid, to.x, middle(to)) })),
        ...behind.map((to, n) => ({ to: "decode", n, // past the prefill workers, over their heads
          d: `M${right(manager)},${mid} C${right(manager) + space * .5},${mid} ${right(manager) + space * .3},${over} ${right(manager) + space},${over} `
          + `H${right(first[0])} C${right(first[0]) + space * .6},${over} ${to.x - space * .6},${to.y + 22} ${to.x},${to.y + 22}` }))],
      kv: both ? prefill.slice(0, 3).flatMap(from => decode.slice(0, 3).map(to => curve(right(from), middle(from) + 8, to.x, middle(to) + 8))) : [],
      tokens: [[prefill, "prefill"], [decode, "decode"]].filter(([boxes]) => boxes.length).map(([boxes, of]) => [boxes.at(-1), of])
        .map(([from, of]) => ({ of, d: `M${centre(from)},${bottom(from)} V${low - 12} Q${centre(from)},${low} ${centre(from) - 12},${low} `
        + `H${centre(gateway) + 12} Q${centre(gateway)},${low} ${centre(gateway)},${low - 12} V${bottom(gateway)}` })),
      report: [`M${right(predictor)},${middle(predictor)} H${monitor.x}`, `M${centre(manager)},${manager.y} V${bottom(monitor)}`,
        ...workers.slice(-1).map(from => `M${centre(from)},${decode[0]?.y ?? from.y} V${middle(monitor) + 12} Q${centre(from)},${middle(monitor)} ${centre(from) - 12},${middle(monitor)} H${right(monitor)}`)],
    },
    labels: {
      arrive: { x: (right(client) + gateway.x) / 2, y: mid - 17 }, arriveSub: { x: (right(client) + gateway.x) / 2, y: mid - 33 },
      answer: { x: (right(client) + gateway.x) / 2, y: mid + 30 },
      predict: { x: centre(gateway) + 10, y: (gateway.y + bottom(predictor)) / 2 + 4, anchor: "start" },
      submit: { x: (right(gateway) + manager.x) / 2, y: mid - 9 },
      place: { x: right(manager) + space / 2, y: mid + (first.length % 2 ? 20 : 4) },
      kv: { x: (right(first[0] ?? manager) + (behind[0]?.x ?? width)) / 2, y: mid + (prefills % 2 ? 27 : 4) },
      tokens: { x: (right(gateway) + manager.x) / 2, y: low + 4 },
    },
  };
}

/** Top to bottom; tokens go back along the left edge. */
export function narrow(width, prefills, decodes) {
  const h = 86, left = 26, small = 54, step = 40;
  const w = (width - left - GAP) / 2;
  const client = { x: left, y: 2, w, h: 36 };
  const gateway = { x: left, y: bottom(client) + step, w, h };
  const predictor = { x: left + w + GAP, y: gateway.y + 14, w, h: small };
  const manager = { x: left, y: bottom(gateway) + step, w, h };
  const monitor = { x: left + w + GAP, y: manager.y + 14, w, h: small };
  const rows = bottom(manager) + step + 6;
  const both = prefills > 0 && decodes > 0;
  const prefill = column(left, rows, both ? w : w * 2 + GAP, h, prefills);
  const decode = column(both ? left + w + GAP : left, rows, both ? w : w * 2 + GAP, h, decodes);
  const first = prefill.length ? prefill : decode;
  const end = rows + Math.max(tall(prefills, h), tall(decodes, h));
  const low = end + 30;
  const x = centre(client);
  return {
    height: low + 8,
    box: { client, gateway, manager, predictor, monitor, prefill, decode },
    paths: {
      arrive: `M${x - 10},${bottom(client)} V${gateway.y}`, answer: `M${x + 10},${gateway.y} V${bottom(client)}`,
      predict: `M${right(gateway)},${middle(predictor)} H${predictor.x}`,
      submit: `M${x},${bottom(gateway)} V${manager.y}`,
      place: [...first.slice(0, 1).map(to => ({ to: prefill.length ? "prefill" : "decode", n: 0, d: `M${x},${bottom(manager)} V${to.y}` })),
        ...(both ? decode.slice(0, 1) : []).map(to => ({ to: "decode", n: 0,
          d: `M${x},${bottom(manager)} C${x},${bottom(manager) + 24} ${centre(to)},${to.y - 26} ${centre(to)},${to.y}` }))],
      kv: both ? [`M${right(prefill[0])},${middle(prefill[0])} H${decode[0].x}`] : [],
      tokens: [...(first.length ? [{ of: prefill.length ? "prefill" : "decode", d: `M${first[0].x},${middle(first[0])} H18 Q8,${middle(first[0])} 8,${middle(first[0]) - 10} `
        + `V${middle(gateway) + 10} Q8,${middle(gateway)} 18,${middle(gateway)} H${gateway.x}` }] : []),
      ...(both ? [{ of: "decode", d: `M${centre(decode.at(-1))},${bottom(decode.at(-1))} V${low - 8} Q${centre(decode.at(-1))},${low} ${centre(decode.at(-1)) - 8},${low} `
        + `H18 Q8,${low} 8,${low - 10} V${middle(gateway) + 10} Q8,${middle(gateway)} 18,${middle(gateway)} H${gateway.x}` }] : [])],
      report: [`M${right(manager)},${middle(monitor)} H${monitor.x}`, `M${centre(predictor)},${bottom(predictor)} V${monitor.y}`],
    },
    labels: {
      arrive: { x: x - 18, y: bottom(client) + step / 2 + 4, anchor: "end" }, arriveSub: null,
      answer: { x: x + 18, y: bottom(client) + step / 2 + 4, anchor: "start" },
      predict: { x: centre(predictor), y: predictor.y - 8 },
      submit: { x: x + 10, y: bottom(gateway) + step / 2 + 4, anchor: "start" },
      place: { x: x - 10, y: bottom(manager) + step / 2 + 7, anchor: "end" },
      kv: { x: left + w + GAP / 2, y: rows - 8 },
      tokens: { x: 16, y: low - 7, anchor: "start" },
    },
  };
}

export function clientLabels(at, arrivals, prompts, tokens, label) {
  return [label(at.arrive, arrivals), at.arriveSub ? label(at.arriveSub, prompts, true) : null, label(at.answer, tokens)];
}
