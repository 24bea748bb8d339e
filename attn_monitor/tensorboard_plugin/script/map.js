/** The heat map of one run, and the pointer over it. */

import { clamp, FONT, h, variable } from "./helpers.js";
import { BROKEN, format, parted, plural } from "./words.js";
import { colours } from "./colours.js";
import { brackets, cross, cutMiddle, pointer, spacing } from "./marks.js";

/** The heads of one run at one step. */
export class HeatMap {
  constructor(app, meta) {
    this.app = app;
    this.meta = meta;
    this.width = Math.max(1, ...meta.heads);
    this.frame = null;
    this.counts = null; // of nan and inf logits, where a head has no value
    this.open = new Map();
    this.names = parted(meta.layers);
    this.canvas = h("canvas", {
      tabIndex: 0, role: "img",
      onclick: (event) => this.pick(event, true), onmousemove: (event) => this.point(event),
      onmouseleave: () => { app.tip.hidden = true; },
      onfocus: () => { if (app.selected?.run !== this.meta.name) app.select({ run: this.meta.name, ...this.like(app.selected) }); },
    });
    this.summary = h("p", { className: "summary" });
    this.note = h("p", { className: "note", hidden: true });
    this.element = h("section", { className: "run" },
      h("h2", { title: meta.name }, h("span", { className: "chip" }), meta.name), this.summary, this.note, this.canvas);
  }

  /** The same head as in another run if there is one, or the first. */
  like(selected) {
    const layer = selected ? this.meta.layers.indexOf(selected.layer) : -1;
    return layer >= 0 && selected.head < this.meta.heads[layer] ? { layer: selected.layer, head: selected.head } : this.first();
  }

  first() {
    const layer = this.meta.heads.findIndex((heads) => heads > 0);
    return { layer: this.meta.layers[Math.max(0, layer)], head: 0 };
  }

  value(layer, head, frame = this.frame) {
    if (!frame || layer >= frame.layers || head >= frame.heads) return NaN;
    return frame.values[layer * frame.heads + head];
  }

  /** Whether a head has no value because its logits are nan or inf: something else than not being measured. */
  broken(layer, head) {
    return Number.isNaN(this.value(layer, head)) && this.value(layer, head, this.counts) > 0;
  }

  /** How many heads have nan or inf logits at the present step, and since which step the first of them. */
  allBroken() {
    const told = [...this.open.values()].filter(({ kind }) => kind === "nonfinite");
    const counted = this.cells().flatMap((row, layer) => row.filter((_, head) => this.broken(layer, head))).length;
    return { count: Math.max(told.length, counted), since: told.length ? Math.min(...told.map(({ since }) => since)) : null };
  }

  /** Rows of values as they are shown; heads that do not exist are left out. */
  cells() {
    return this.meta.heads.map((heads, layer) => Array.from({ length: heads }, (_, head) => this.value(layer, head)));
  }

  layout() {
    const count = Math.max(1, this.meta.layers.length);
    const most = Math.max(1, ...[...this.app.maps.values()].map((map) => map.meta.layers.length)); // rows of neighbours level
    const high = clamp(0.45 * window.innerHeight, 240, 600); // the lines of a head start in the same window
    const room = Math.max(160, this.element.clientWidth - 2);
    const context = this.canvas.getContext("2d");
    context.font = FONT;
    const widest = Math.max(...this.names.own.map((name) => context.measureText(name).width), 24);
    this.left = Math.min(Math.ceil(widest) + 18, Math.max(60, Math.floor(room * 0.3)), 220);
    this.labels = this.cut(context, this.left - 18);
    this.cell = {
      width: clamp(Math.floor((room - this.left) / this.width), 2, 36),
      height: clamp(Math.floor(high / most), 4, 26),
    };
    [this.top, this.bottom] = [26, 18];
    const ratio = window.devicePixelRatio || 1;
    const width = this.left + this.cell.width * this.width + 2;
    const height = this.top + this.cell.height * count + this.bottom;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return { context, width, height };
  }

  draw() {
    const { context, width, height } = this.layout();
    const { meta, cell, left } = this;
    const statistic = this.frame && this.app.describe(meta, this.frame.statistic); // not yet the one just chosen
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    const [muted, accent] = ["--muted", "--accent"].map((name) => variable(this.app.element, name));
    const { selected } = this.app;
    const row = selected ? meta.layers.indexOf(selected.layer) : -1;
    const chosen = row >= 0 && selected.head < meta.heads[row];
    const write = (text, x, y, marked) => {
      context.fillStyle = marked ? accent : muted;
      context.font = marked ? `bold ${FONT}` : FONT;
      context.fillText(text, x, y);
    };
    const { before, after } = this.names;
    context.textAlign = "left";
    write(cutMiddle(context, before || after ? `layer: ${before}*${after}` : "layer", width - 2), 0, 7);
    const every = spacing(cell.height, 13);
    context.textAlign = "right";
    this.labels.forEach((label, index) => {
      const hidden = chosen && index !== row && Math.abs(index - row) * cell.height < 13; // the chosen one has its place
      if ((index % every && !(chosen && index === row)) || hidden) return;
      write(label, left - 14, this.top + (index + 0.5) * cell.height, chosen && index === row);
    });
    write("head", left - 14, height - this.bottom / 2);
    const stride = spacing(cell.width, 18);
    context.textAlign = "center";
    for (let head = 0; head < this.width; head++) {
      const marked = chosen && head === selected.head;
      if ((head % stride && !marked) || (chosen && !marked && Math.abs(head - selected.head) * cell.width < 18)) continue;
      write(String(head), left + (head + 0.5) * cell.width, height - this.bottom / 2, marked);
    }
    this.canvas.setAttribute("aria-label", this.label(chosen ? row : -1));
    if (!statistic) return;
    const gap = cell.width >= 6 && cell.height >= 6 ? 1 : 0;
    const [unknown, alarm] = ["--unknown", "--alarm"].map((name) => variable(this.app.element, name));
    const colour = colours(statistic);
    meta.heads.forEach((heads, layer) => {
      for (let head = 0; head < heads; head++) {
        const value = this.value(layer, head);
        const [x, y] = [left + head * cell.width, this.top + layer * cell.height];
        context.fillStyle = Number.isNaN(value) ? unknown : colour(value);
        context.fillRect(x, y, cell.width - gap, cell.height - gap);
        if (this.broken(layer, head)) cross(context, alarm, x, y, cell.width - gap, cell.height - gap);
        if (statistic.threshold !== null && value > statistic.threshold && cell.width >= 5) {
          context.fillStyle = "#000";
          context.fillRect(x + cell.width / 2 - 1.5, y + cell.height / 2 - 1.5, 2.5, 2.5);
        }
      }
    });
    for (const [key, { severity }] of this.open) {
      const [layer, head] = key.split(":").map(Number);
      this.frameCell(context, layer, head, severity === "critical" ? "#e000c0" : "#000", 0.5, severity === "critical" ? 2.5 : 2);
      if (severity !== "critical") this.frameCell(context, layer, head, "#fff", 1.5, 1);
    }
    if (chosen) {
      const [x, y] = [left + selected.head * cell.width, this.top + row * cell.height];
      const out = gap ? 0.5 : 2; // around cells too small for corners of their own
      brackets(context, x - out - gap / 2, y - out - gap / 2, cell.width + 2 * out, cell.height + 2 * out);
      pointer(context, accent, left - 3, y + cell.height / 2, 1, 0);
      pointer(context, accent, x + cell.width / 2, this.top - 3, 0, 1);
    }
  }

  /** What tells the layers apart, as long as there is room; where that makes two alike, with the row before it. */
  cut(context, room) {
    const { own } = this.names;
    const cut = own.map((name) => cutMiddle(context, name, room));
    if (new Set(cut).size === cut.length) return cut;
    return own.map((name, row) => cutMiddle(context, `${row}: ${name}`, room, 0.75));
  }

  frameCell(context, layer, head, style, inset, width) {
    context.strokeStyle = style;
    context.lineWidth = width;
    context.strokeRect(this.left + head * this.cell.width + inset, this.top + layer * this.cell.height + inset,
      this.cell.width - 2 * inset - 1, this.cell.height - 2 * inset - 1);
  }

  label(row) {
    const { selected } = this.app;
    const { statistic, step } = this.frame ?? this.app;
    const chosen = row < 0 ? "" : ` Selected: ${this.words(row, selected.head)}.`;
    return `Heat map of ${statistic} in ${this.meta.name}: ${plural(this.meta.layers.length, "layer")}, up to ` +
      `${plural(this.width, "head")}, step ${step}.${chosen}`;
  }

  words(layer, head) {
    return `${this.meta.layers[layer]}, head ${head}: ${this.reading(layer, head)}`;
  }

  /** A head's value, and since when it has which event. */
  reading(layer, head) {
    const event = this.open.get(`${layer}:${head}`);
    const value = this.broken(layer, head) ? BROKEN : format(this.value(layer, head));
    return value + (event ? `, ${event.severity} since step ${event.since}` : "");
  }

  /** The layer and head under the pointer, or null. */
  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const head = Math.floor((event.clientX - box.left - this.left) / this.cell.width);
    const layer = Math.floor((event.clientY - box.top - this.top) / this.cell.height);
    return head >= 0 && layer >= 0 && head < (this.meta.heads[layer] || 0) ? { layer, head } : null;
  }

  pick(event) {
    const place = this.under(event);
    if (place) this.app.select({ run: this.meta.name, layer: this.meta.layers[place.layer], head: place.head });
  }

  point(event) {
    const place = this.under(event);
    const { tip } = this.app;
    const text = place ? this.words(place.layer, place.head) : this.named(event);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, room))}px`;
    tip.style.top = `${event.clientY + 16}px`;
  }

  /** The whole name of the layer whose label is under the pointer, or an empty text. */
  named(event) {
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top - this.top) / this.cell.height);
    return event.clientX - box.left < this.left ? this.meta.layers[layer] ?? "" : "";
  }
}
