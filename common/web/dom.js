// Elements from data. Text goes in as text nodes only, so whatever a client named something stays text.
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") node.style.cssText = value; // the attribute itself is forbidden by the page's policy
    else if (name.startsWith("on")) throw new Error("handlers are added with addEventListener");
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
export const byId = id => document.getElementById(id);

/** Put new children in place of the old ones; the element that had the focus gets it back, by its data-key. */
export function redraw(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const top = parent.scrollTop;
  parent.replaceChildren(...children.flat(Infinity).filter(child => child !== null && child !== undefined));
  parent.scrollTop = top;
  if (focused) parent.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}
