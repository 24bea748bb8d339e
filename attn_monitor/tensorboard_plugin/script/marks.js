/** What is drawn on a canvas: cut labels, crosses, brackets, pointers. */

import { h } from "./helpers.js";

/** Cut a text in its middle, of which `share` stays at the front. */
export function cutMiddle(context, text, room, share = 0.5) {
  if (context.measureText(text).width <= room) return text;
  for (let kept = text.length - 1; kept > 0; kept--) {
    const front = Math.ceil(kept * share);
    const cut = `${text.slice(0, front)}…${text.slice(text.length - (kept - front))}`;
    if (context.measureText(cut).width <= room) return cut;
  }
  return "…";
}

/** Every how many cells of this size there is room for a label. */
export const spacing = (cell, room) => [1, 2, 5, 10, 20, 50, 100].find((every) => every * cell >= room) ?? 200;

/** Mark a head whose value is nan, in cells of every size. */
export function cross(context, style, x, y, width, height) {
  const inset = Math.min(width, height) < 8 ? 0 : 2;
  context.strokeStyle = style;
  context.lineWidth = inset ? 2 : 1;
  context.beginPath();
  for (const [top, bottom] of [[y + inset, y + height - inset], [y + height - inset, y + inset]]) {
    context.moveTo(x + inset, top);
    context.lineTo(x + width - inset, bottom);
  }
  context.stroke();
}

/** Mark the selected head: corners around it, in a colour that no map and no event has. */
export function brackets(context, x, y, width, height) {
  const [across, down] = [Math.min(8, width / 3), Math.min(8, height / 3)];
  context.save();
  const thick = Math.min(width, height) < 8 ? 1.5 : 2.5;
  for (const [style, thickness] of [["#00222e", 2 * thick], ["#00e0ff", thick]]) {
    Object.assign(context, { strokeStyle: style, lineWidth: thickness, lineCap: "square" });
    context.beginPath();
    for (const [left, top, right, bottom] of [[x, y, across, down], [x + width, y, -across, down],
      [x, y + height, across, -down], [x + width, y + height, -across, -down]]) {
      context.moveTo(left + right, top);
      context.lineTo(left, top);
      context.lineTo(left, top + bottom);
    }
    context.stroke();
  }
  context.restore();
}

/** The mark of the selected head, for the legend. */
export function selectedKey() {
  const ratio = window.devicePixelRatio || 1;
  const canvas = h("canvas", { className: "selected", width: 22 * ratio, height: 18 * ratio });
  Object.assign(canvas.style, { width: "22px", height: "18px" });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  brackets(context, 3, 3, 16, 12);
  return canvas;
}

/** A small triangle whose tip is at x, y, pointing along (right, down): it finds the head in a map of small cells. */
export function pointer(context, style, x, y, right, down) {
  context.fillStyle = style;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - 7 * right - 4 * down, y - 7 * down - 4 * right);
  context.lineTo(x - 7 * right + 4 * down, y - 7 * down + 4 * right);
  context.fill();
}
