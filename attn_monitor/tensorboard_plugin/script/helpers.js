/** Elements, numbers and links, for all other modules. */

/** Make an element. Children are nodes or text; nothing is ever parsed as HTML. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const FONT = "11px system-ui, sans-serif";

export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
export const variable = (element, name) => getComputedStyle(element).getPropertyValue(name).trim();

/** Index of the last entry of a growing list that is not above `value`; -1 if there is none. */
export function lastAt(list, value) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** What a link such as #run=...&layer=...&head=3&step=120 names, or null. */
export function parseLink(hash) {
  const query = new URLSearchParams(hash.replace(/^#/, ""));
  if (!["run", "layer", "head", "step"].every((name) => query.has(name))) return null;
  return { run: query.get("run"), layer: query.get("layer"), head: Number(query.get("head")), step: Number(query.get("step")) };
}
