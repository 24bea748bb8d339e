/**
 * The Attention view: a heat map of layers x heads over time, and what became of one head.
 *
 * `render()` is what TensorBoard's iframe calls. `mount(element, source)` shows the same from any source:
 *
 *   runs()                                -> [name, ...]
 *   meta(run)                             -> {name, layers, heads, head_dims, steps, statistics, scalars, events, notes}
 *   frames(run, statistic, first, count)  -> {steps, shape: [S, L, H], data: base64 of little-endian float32}
 *   line(run, layer, head, statistics)    -> {statistics: {name: {steps, values}}}, null where there is no value
 *   events(run)                           -> [{step, layer, head, severity, state, message, ...}, ...]
 *   scalar(run, tag)                      -> {steps, values}
 *
 * all as promises, and `fixed: true` where nothing can be added later. uPlot is expected as a global. Names come from
 * users: they only ever become text nodes.
 */

// ---------------------------------------------------------------------------------------------------------- sources

/** Ask TensorBoard's routes, which lie beside this module. */
function httpSource(base) {
  const get = async (route, query = {}) => {
    const url = new URL(route, base);
    for (const [name, value] of Object.entries(query)) {
      for (const one of [value].flat()) url.searchParams.append(name, one);
    }
    const response = await fetch(url);
    const body = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
    if (!response.ok) throw new Error(body.error);
    return body;
  };
  return {
    runs: () => get("runs"),
    meta: (run) => get("meta", { run }),
    frames: (run, statistic, first, count) => get("frames", { run, statistic, first, count }),
    line: (run, layer, head, statistics) => get("line", { run, layer, head, statistic: statistics }),
    events: (run) => get("events", { run }),
    scalar: (run, tag) => get("scalar", { run, tag }),
  };
}

/** Serve what is embedded in a page: {version, runs: [{meta, tables, scalars, events}]}. */
export function inlineSource(data) {
  if (data.version !== 1) throw new Error(`expected data of version 1, got ${data.version}`);
  const runs = new Map(data.runs.map((run) => [run.meta.name, run]));
  const decoded = new Map();
  const table = (run, statistic) => {
    const stored = runs.get(run).tables[statistic];
    if (!decoded.has(stored)) {
      const places = new Map(stored.steps.map((step, index) => [step, index]));
      decoded.set(stored, { ...stored, places, values: decode(stored.data) });
    }
    return decoded.get(stored);
  };
  return {
    fixed: true,
    runs: async () => [...runs.keys()],
    meta: async (run) => runs.get(run).meta,
    frames: async (run, statistic, first, count) => {
      const { shape, places, values } = table(run, statistic);
      const size = shape[1] * shape[2];
      const steps = runs.get(run).meta.steps.slice(first, first + count);
      const chosen = new Float32Array(steps.length * size).fill(NaN);
      steps.forEach((step, index) => {
        const place = places.get(step);
        if (place !== undefined) chosen.set(values.subarray(place * size, (place + 1) * size), index * size);
      });
      return { steps, shape: [steps.length, shape[1], shape[2]], values: chosen };
    },
    line: async (run, layer, head, statistics) => {
      const lines = {};
      for (const name of statistics) {
        const { steps, shape, values } = table(run, name);
        const at = (index) => values[(index * shape[1] + layer) * shape[2] + head];
        const inside = layer < shape[1] && head < shape[2];
        lines[name] = { steps, values: steps.map((_, index) => (inside && isFinite(at(index)) ? at(index) : null)) };
      }
      return { statistics: lines };
    },
    events: async (run) => runs.get(run).events,
    scalar: async (run, tag) => runs.get(run).scalars[tag],
  };
}

function decode(data) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  return new Float32Array(bytes.buffer);
}

// ---------------------------------------------------------------------------------------------------------- helpers

/** Make an element. Children are nodes or text; nothing is ever parsed as HTML. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const BROKEN = "nan or inf logits";

function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  return short(value, 4);
}

/** A number in so many digits, without zeros at their end, and with an exponent rather than many zeros: 1e-4. */
function short(value, digits) {
  const rounded = Number(value.toPrecision(digits));
  return rounded !== 0 && (Math.abs(rounded) < 1e-3 || Math.abs(rounded) >= 1e5) ? rounded.toExponential() : String(rounded);
}

const times = (value) => `×${short(10 ** value, 3)}`;

/** Part the names of layers into what they share and what tells them apart: "layers.", ["0", "1"], ".attn". */
export function parted(names) {
  const parts = names.map((name) => name.split("."));
  const most = names.length > 1 ? Math.min(...parts.map((one) => one.length)) - 1 : 0; // something has to be left
  const shared = (at, limit) => {
    let count = 0;
    while (count < limit && parts.every((one) => one.at(at(count)) === parts[0].at(at(count)))) count += 1;
    return count;
  };
  const before = shared((count) => count, most);
  const after = shared((count) => -1 - count, most - before);
  return {
    before: parts[0]?.slice(0, before).map((part) => `${part}.`).join("") ?? "",
    own: parts.map((one) => one.slice(before, one.length - after).join(".")),
    after: after ? parts[0].slice(-after).map((part) => `.${part}`).join("") : "",
  };
}

/** Index of the last entry of a growing list that is not above `value`; -1 if there is none. */
function lastAt(list, value) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const variable = (element, name) => getComputedStyle(element).getPropertyValue(name).trim();
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// ---------------------------------------------------------------------------------------------------------- colours

const VIRIDIS = [
  [68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140],
  [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37],
];
const BELOW = [[8, 29, 88], [34, 84, 160], [66, 120, 180]];
const ABOVE = [[222, 105, 8], [252, 166, 54], [255, 245, 190]];
const FONT = "11px system-ui, sans-serif";
const LINES = ["#1f77b4", "#e6780b", "#2a9d3a", "#9467bd", "#b5485d", "#7f7f7f"];
const FACTORS = [
  ["scale_ratio", "scale·√d_k", "#7f7f7f"],
  ["q_rms", "query norm", "#4e9fd6"],
  ["k_rms", "key norm", "#f0a34b"],
  ["alignment", "alignment", "#5fb76a"],
];

const shades = (stops) => Array.from({ length: 513 }, (_, index) => {
  const place = (index / 512) * (stops.length - 1);
  const below = Math.min(Math.floor(place), stops.length - 2);
  const mixed = stops[below].map((low, channel) => low + (stops[below + 1][channel] - low) * (place - below));
  return `rgb(${mixed.map(Math.round).join(",")})`;
});
const SHADES = { whole: shades(VIRIDIS), below: shades(BELOW), above: shades(ABOVE) };

/** Where values stand on a scale, 0 to 1, as a function; the same as `Scale.position` in attn_monitor/scales.py. */
export function positions({ kind, low, high }) {
  const stretch = kind === "log" ? Math.log : kind === "signed" ? Math.asinh : (x) => x;
  const [start, length] = [stretch(low), stretch(high) - stretch(low)];
  return (value) => (stretch(clamp(value, low, high)) - start) / length;
}

/** The colour of values as a function: the maps of attn_monitor/colors.py, with a break at the limit if there is one. */
export function colours({ scale, threshold }) {
  const position = positions(scale);
  const pick = (map, place) => map[Math.round(512 * clamp(place, 0, 1))];
  if (threshold === null) return (value) => pick(SHADES.whole, position(value));
  const limit = clamp(position(threshold), 1e-6, 1 - 1e-6);
  return (value) => (value > threshold
    ? pick(SHADES.above, (position(value) - limit) / (1 - limit)) : pick(SHADES.below, position(value) / limit));
}

// ----------------------------------------------------------------------------------------------------------- frames

/** Tables by piece: the steps around the one that is looked at, not the whole run. */
class Frames {
  constructor(source) {
    this.source = source;
    this.pieces = new Map();
  }

  forget(run) {
    for (const [key, piece] of this.pieces) if (piece.run === run) this.pieces.delete(key);
  }

  /** Promise of {layers, heads, values} of one step, by index into the run's steps. */
  async get(meta, statistic, index) {
    const cells = Math.max(1, meta.layers.length * Math.max(1, ...meta.heads));
    const size = clamp(Math.floor(2 ** 17 / cells), 1, 256);
    const number = Math.floor(index / size);
    const piece = this.piece(meta, statistic, number, size);
    if ((number + 1) * size < meta.steps.length && index % size > size / 2) this.piece(meta, statistic, number + 1, size);
    const { steps, shape, values } = await piece;
    const place = index - number * size;
    if (steps[place] !== meta.steps[index]) throw new Error("the run was rewritten; press r to read it again");
    const [, layers, heads] = shape;
    return { layers, heads, values: values.subarray(place * layers * heads, (place + 1) * layers * heads) };
  }

  piece(meta, statistic, number, size) {
    const key = JSON.stringify([meta.name, statistic, number]);
    let piece = this.pieces.get(key);
    if (!piece) {
      const first = number * size;
      const count = Math.min(size, meta.steps.length - first);
      piece = this.source.frames(meta.name, statistic, first, count)
        .then((found) => ({ ...found, values: found.values || decode(found.data) }));
      piece.run = meta.name;
      piece.catch(() => this.pieces.delete(key));
    } else {
      this.pieces.delete(key);
    }
    this.pieces.set(key, piece); // the newest stands last
    if (this.pieces.size > 128) this.pieces.delete(this.pieces.keys().next().value);
    return piece;
  }
}

// --------------------------------------------------------------------------------------------------------- heat map

/** The heads of one run at one step. */
class HeatMap {
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

  summarise() {
    const statistic = this.app.describe(this.meta, this.app.statistic);
    const [first] = this.meta.steps;
    const early = first === undefined || this.app.step < first;
    this.note.hidden = Boolean(statistic) && !early;
    if (!statistic) this.note.textContent = `${this.app.statistic} was not measured in this run.`;
    if (early) {
      this.note.textContent = `No observation at or before step ${this.app.step}` +
        (first === undefined ? "." : `: the first of this run is at step ${first}.`);
      this.summary.textContent = "";
      this.summary.classList.remove("alarm");
      return;
    }
    this.summariseStep(statistic);
  }

  summariseStep(statistic) {
    const counts = { warning: 0, critical: 0 };
    for (const { severity, kind } of this.open.values()) if (kind !== "nonfinite") counts[severity] += 1;
    const broken = this.allBroken();
    const first = this.app.events.find((event) => event.run === this.meta.name && event.state === "opened");
    const parts = [];
    if (broken.count) {
      const since = broken.since === null ? `at step ${this.app.step}` : `since step ${broken.since}`;
      parts.push(`${plural(broken.count, "head")} with ${BROKEN} ${since}`);
    }
    if (counts.warning + counts.critical) {
      parts.push(`${plural(counts.warning + counts.critical, "saturated head")} at step ${this.app.step}` +
        (counts.critical ? ` (${counts.critical} critical)` : ""));
    } else if (!broken.count) {
      const above = statistic && statistic.threshold !== null
        ? this.cells().flat().filter((value) => value > statistic.threshold).length : 0;
      parts.push(above ? `no event is open at step ${this.app.step}, but ${plural(above, "head")} above the limit`
        : `no saturated head at step ${this.app.step}`);
    }
    if (first) parts.push(`first ever: ${first.layer} head ${first.head}, step ${first.step}`);
    const worst = statistic && this.worst(statistic.worse);
    if (worst) {
      parts.push(`${statistic.worse === "up" ? "highest" : "lowest"} ${statistic.label}: ` +
        `${this.meta.layers[worst.layer]} head ${worst.head}, ${format(worst.value)}`);
    }
    this.summary.textContent = parts.join(" · ");
    this.summary.classList.toggle("alarm", counts.warning + counts.critical + broken.count > 0);
  }

  worst(direction) {
    if (!direction) return null;
    let found = null;
    this.cells().forEach((row, layer) => row.forEach((value, head) => {
      if (Number.isNaN(value)) return;
      if (!found || (direction === "up" ? value > found.value : value < found.value)) found = { layer, head, value };
    }));
    return found;
  }
}

/** Cut a text in its middle, of which `share` stays at the front. */
function cutMiddle(context, text, room, share = 0.5) {
  if (context.measureText(text).width <= room) return text;
  for (let kept = text.length - 1; kept > 0; kept--) {
    const front = Math.ceil(kept * share);
    const cut = `${text.slice(0, front)}…${text.slice(text.length - (kept - front))}`;
    if (context.measureText(cut).width <= room) return cut;
  }
  return "…";
}

/** Every how many cells of this size there is room for a label. */
const spacing = (cell, room) => [1, 2, 5, 10, 20, 50, 100].find((every) => every * cell >= room) ?? 200;

/** Mark a head whose value is nan, in cells of every size. */
function cross(context, style, x, y, width, height) {
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
function brackets(context, x, y, width, height) {
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
function selectedKey() {
  const ratio = window.devicePixelRatio || 1;
  const canvas = h("canvas", { className: "selected", width: 22 * ratio, height: 18 * ratio });
  Object.assign(canvas.style, { width: "22px", height: "18px" });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  brackets(context, 3, 3, 16, 12);
  return canvas;
}

/** A small triangle whose tip is at x, y, pointing along (right, down): it finds the head in a map of small cells. */
function pointer(context, style, x, y, right, down) {
  context.fillStyle = style;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - 7 * right - 4 * down, y - 7 * down - 4 * right);
  context.lineTo(x - 7 * right + 4 * down, y - 7 * down + 4 * right);
  context.fill();
}

// ----------------------------------------------------------------------------------------------------------- charts

/** Draw lines of one head, one for each run, the loss on the same x axis, events and the present step. */
function lineChart(app, card, statistic, lines, losses, marks) {
  const all = [...lines, ...losses];
  const data = uPlot.join(all.map(({ steps, values }) => [steps, values]));
  const known = lines.flatMap(({ values }) => values.filter((value) => value !== null));
  const { threshold } = statistic;
  const ends = [known.reduce((a, b) => Math.min(a, b), threshold ?? Infinity), known.reduce((a, b) => Math.max(a, b), threshold ?? -Infinity)];
  const logarithmic = statistic.scale.kind === "log" && ends[0] > 0 && ends[1] / ends[0] >= 10;
  const range = (_, low, high) => {
    if (low === null) return [0, 1];
    if (threshold !== null) [low, high] = [Math.min(low, threshold), Math.max(high, threshold)];
    if (low === high) return [low - 0.5, high + 0.5];
    return logarithmic ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.08, true);
  };
  const series = [
    {},
    ...lines.map(({ colour }) => ({ scale: "y", stroke: colour, width: 1.6, spanGaps: false, points: { show: points } })),
    ...losses.map(({ colour }) => ({ scale: "loss", stroke: colour, width: 1, dash: [3, 3], points: { show: false } })),
  ];
  return chart(app, card, data, {
    series,
    scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1, range }, loss: {} },
    axes: [axis(app), axis(app, { scale: "y", size: 58, values: readable }),
      axis(app, { scale: "loss", side: 1, size: 48, values: readable, grid: { show: false } })]
      .slice(0, losses.length ? 3 : 2),
    marks, threshold,
    read: (index) => lines.map(({ broken }, place) => {
      const value = data[place + 1][index] ?? NaN;
      return Number.isNaN(value) && broken?.has(data[0][index]) ? BROKEN : format(value);
    }).join(" | "),
  });
}

/** Draw what each factor adds to the logarithm of the growth of the logits, growth upwards, shrinking downwards. */
function factorChart(app, card, factors, total, marks) {
  const { steps } = factors[0];
  const zero = steps.map(() => 0);
  const [up, down] = [[zero], [zero]];
  for (const { values } of factors) {
    const stack = (sums, part) => sums.map((sum, index) => (values[index] === null ? null : (sum ?? 0) + part(values[index])));
    up.push(stack(up.at(-1), (value) => Math.max(value, 0)));
    down.push(stack(down.at(-1), (value) => Math.min(value, 0)));
  }
  const data = [steps, ...up, ...down, total.values]; // the whole last, or the bands would cover it
  const hidden = { scale: "y", width: 0, points: { show: false } };
  const bands = factors.flatMap(({ colour }, index) => [
    { series: [2 + index, 1 + index], fill: colour, dir: -1 },
    { series: [2 + up.length + index, 1 + up.length + index], fill: colour, dir: 1 },
  ]);
  return chart(app, card, data, {
    series: [{}, ...[...up, ...down].map(() => hidden),
      { scale: "y", stroke: () => variable(app.element, "--ink"), width: 2, points: { show: false } }],
    bands,
    scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(low ?? 0, -TWICE), Math.max(high ?? 0, TWICE)] } },
    axes: [axis(app), axis(app, { scale: "y", size: 58, splits: multiples, values: (_, splits) => splits.map(times) })],
    marks, threshold: null,
    read: (index) => (total.values[index] === null ? "" : `std ${times(total.values[index])} = ` +
      factors.map(({ label, values }) => `${label} ${values[index] === null ? "?" : times(values[index])}`).join(" · ")),
  });
}

const TWICE = Math.log10(2); // a factor that stays between half and twice its start did not grow

/** Where the axis of a growth is labelled: round multiples, given as logarithms. */
function multiples(plot, axisIndex, low, high) {
  const [span, found] = [high - low, []];
  const mantissas = span < 1 ? [1, 1.5, 2, 3, 5, 7] : span < 2.2 ? [1, 2, 5] : [1];
  const every = span < 2.2 ? 1 : Math.ceil(span / 8);
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    if (power % every) continue;
    found.push(...mantissas.map((mantissa) => power + Math.log10(mantissa)).filter((one) => one >= low - 1e-9 && one <= high + 1e-9));
  }
  return found;
}

/** The labels of an axis; where uPlot leaves one out, on a logarithmic axis, there is null. */
const readable = (plot, splits) => splits.map((value) => (value === null ? null : short(value, 6)));

const points = (plot, series, first, last) => last - first < 2;

function axis(app, more = {}) {
  return {
    stroke: () => variable(app.element, "--muted"), font: FONT, size: 30,
    ...more, grid: { stroke: () => variable(app.element, "--line"), width: 1, ...more.grid },
    ticks: { stroke: () => variable(app.element, "--line"), width: 1, size: 4 },
  };
}

function chart(app, card, data, { marks, threshold, read, ...options }) {
  const across = (plot, value, style, dash) => {
    const { ctx, bbox } = plot;
    const x = Math.round(plot.valToPos(value, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.save();
    Object.assign(ctx, { strokeStyle: style, lineWidth: window.devicePixelRatio || 1 });
    ctx.setLineDash(dash);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  };
  const level = (plot) => {
    const { ctx, bbox } = plot;
    const y = Math.round(plot.valToPos(threshold, "y", true));
    ctx.save();
    Object.assign(ctx, { strokeStyle: variable(app.element, "--alarm"), lineWidth: window.devicePixelRatio || 1 });
    ctx.setLineDash([6, 4]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.restore();
  };
  const now = h("div", { className: "now-line" }); // an element of its own: a step on must not draw every chart again
  const showNow = () => {
    if (!plot) return;
    const x = plot.valToPos(app.step, "x");
    now.hidden = !(x >= 0 && x <= plot.over.clientWidth);
    now.style.transform = `translateX(${x}px)`;
  };
  let plot = null;
  plot = new uPlot({
    width: Math.max(200, card.body.clientWidth), height: card.height, legend: { show: false },
    cursor: { sync: { key: app.syncKey }, points: { size: 5 } },
    ...options,
    hooks: {
      draw: [(plot) => {
        for (const { step, severity, state } of marks) {
          const style = state === "ended" ? "--muted" : severity === "critical" ? "--alarm" : "--warning";
          across(plot, step, variable(app.element, style), state === "ended" ? [2, 3] : []);
        }
        if (threshold !== null) level(plot);
        showNow();
      }],
      setCursor: [(plot) => {
        const { idx } = plot.cursor;
        card.reading.textContent = idx === null || idx === undefined ? "" : `step ${data[0][idx]}: ${read(idx)}`;
      }],
    },
  }, data, card.body);
  plot.over.append(now);
  plot.showNow = showNow;
  showNow();
  let pressed = 0;
  plot.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
  plot.over.addEventListener("click", (event) => {
    const { idx } = plot.cursor;
    if (Math.abs(event.clientX - pressed) < 4 && idx !== null && idx !== undefined) app.setStep(data[0][idx]);
  });
  return plot;
}

// -------------------------------------------------------------------------------------------------------------- app

const HELP = [
  ["← → ↑ ↓", "another head"], [", .", "a step back, a step on"], ["Home End", "first, last step"],
  ["Space", "play, pause"], ["[ ]", "previous, next statistic"], ["p n", "previous, next event"],
  ["r", "read again"], ["d", "light, dark"], ["?", "these keys"],
];

class App {
  constructor(element, source) {
    Object.assign(this, {
      element, source, frames: new Frames(source), syncKey: `attn-${Math.random()}`,
      names: [], shown: [], metas: new Map(), maps: new Map(), events: [], steps: [],
      statistic: null, step: null, selected: null, loss: undefined, playing: false, plots: [], turn: 0, refreshed: 0, cost: 0,
      showing: 0, attempt: 0, elsewhere: new Map(),
    });
    element.classList.add("attn");
    this.build();
  }

  build() {
    this.statisticSelect = h("select", { "aria-label": "Statistic", onchange: () => this.setStatistic(this.statisticSelect.value) });
    this.slider = h("input", { type: "range", min: 0, max: 0, step: 1, "aria-label": "Step",
      oninput: () => this.setStep(this.steps[Number(this.slider.value)]) });
    this.stepLabel = h("output", { className: "step" });
    this.playButton = h("button", { type: "button", className: "play", onclick: () => this.play(!this.playing) }, "Play");
    this.lossSelect = h("select", { "aria-label": "Scalar beside the lines", onchange: () => { this.loss = this.lossSelect.value; this.detail(); } });
    this.runList = h("div", { className: "runs", role: "group", "aria-label": "Runs" });
    this.banner = h("p", { className: "banner", role: "alert", hidden: true });
    this.definition = h("p", { className: "definition" });
    this.legend = h("div", { className: "legend" });
    this.maps_ = h("div", { className: "maps" });
    this.readout = h("p", { className: "readout", "aria-live": "polite" });
    this.toLines = h("button", { type: "button", hidden: true, onclick: () => this.detailTitle.scrollIntoView() }, "Its charts ↓");
    this.causes = h("div", { className: "causes" });
    this.flat = h("p", { className: "flat" });
    this.keys = h("p", { className: "keys" });
    this.detailTitle = h("h2", { className: "head" });
    this.charts = h("div", { className: "charts" });
    this.eventList = h("ol", { className: "events" });
    this.eventTitle = h("h2", {}, "Events");
    this.noteList = h("ul", { className: "notes", "aria-label": "Notes beside the events" });
    this.tip = h("div", { className: "tip", hidden: true });
    this.help = h("dialog", { className: "help" }, h("h2", {}, "Keys"),
      h("dl", {}, ...HELP.filter(([keys]) => keys !== "r" || !this.source.fixed).flatMap(([keys, meaning]) => [h("dt", {}, keys), h("dd", {}, meaning)])),
      h("form", { method: "dialog" }, h("button", {}, "Close")));
    this.element.replaceChildren(
      h("header", {},
        h("label", {}, "Statistic ", this.statisticSelect), this.playButton,
        h("label", { className: "time" }, "Step ", this.slider), this.stepLabel,
        h("label", {}, "Beside ", this.lossSelect),
        h("button", { type: "button", className: "refresh", title: "Read the runs again (r)", hidden: Boolean(this.source.fixed),
          onclick: () => this.refresh() }, "Refresh"),
        h("button", { type: "button", title: "Light or dark (d)", onclick: () => this.toggleTheme() }, "Theme"),
        h("button", { type: "button", title: "Keys (?)", onclick: () => this.help.showModal() }, "?")),
      this.runList, this.banner, h("div", { className: "scale" }, this.definition, this.legend), this.maps_,
      h("div", { className: "status" }, this.readout, this.toLines),
      h("div", { className: "below" }, h("section", {}, this.detailTitle, this.causes, this.keys, this.charts, this.flat), h("section", {}, this.eventTitle, this.noteList, this.eventList)),
      this.tip, this.help);
    this.element.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("keydown", (event) => { if (event.target === document.body) this.key(event); });
    window.addEventListener("hashchange", () => this.follow(location.hash));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    const watch = new IntersectionObserver(([entry]) => { // charts that a click would change out of sight
      this.toLines.hidden = entry.isIntersecting || entry.boundingClientRect.top < 0;
    }, { rootMargin: "0px 0px -120px" });
    watch.observe(this.detailTitle);
    let waiting = 0;
    new ResizeObserver(() => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.resize(), 100);
    }).observe(this.element);
  }

  // ------------------------------------------------------------------------------------------------------- loading

  async start() {
    await this.guard(async () => {
      this.names = await this.source.runs();
      if (!this.names.length) {
        this.say("There is no attention data here yet. Train with Trainer(callbacks=[AttentionMonitor()]) and a " +
          "TensorBoardLogger that writes into this directory; this page looks again every 30 seconds.");
        return;
      }
      const link = parse(location.hash);
      const first = this.names.slice(0, 4);
      if (link && this.names.includes(link.run) && !first.includes(link.run)) first[0] = link.run;
      await this.show(first);
      if (link) this.follow(location.hash);
    });
    if (this.source.fixed) return;
    setInterval(() => {
      // What takes long to read is read again less often: at most a tenth of the time goes into it.
      if (!document.hidden && performance.now() - this.refreshed > Math.max(29_000, 10 * this.cost)) this.refresh();
    }, 30_000);
  }

  /** Show these runs, loading what is not known yet; a later call overtakes an earlier one. */
  async show(names) {
    this.showing += 1;
    const { showing } = this;
    const stale = () => showing !== this.showing;
    this.overtake();
    this.shown = this.names.filter((name) => names.includes(name));
    this.listRuns();
    if (!this.shown.length) {
      this.empty();
      this.say("No run is chosen.");
      return;
    }
    if (this.selected && !this.shown.includes(this.selected.run)) this.selected = null;
    await Promise.all(this.shown.filter((name) => !this.metas.has(name)).map(async (name) => {
      this.metas.set(name, await this.source.meta(name));
    }));
    if (stale()) return;
    this.buildMaps();
    this.offer();
    await this.paint();
    if (stale()) return;
    this.element.dataset.ready = "true";
    performance.mark("attn-painted");
    await this.loadEvents(stale);
    if (stale()) return;
    if (!this.selected) this.selectWorst();
    await this.detail();
    if (!stale()) await this.lookElsewhere(stale);
  }

  /** Nothing is chosen: nothing of what was may stay. */
  empty() {
    this.turn += 1;
    Object.assign(this, { maps: new Map(), events: [], steps: [], step: null, selected: null });
    this.maps_.replaceChildren();
    this.clearCharts();
    this.detailTitle.replaceChildren();
    this.listEvents();
    this.describeSelected();
    this.charts.dataset.ready = "true";
  }

  /** Tell which runs that are not shown have events. */
  async lookElsewhere(stale) {
    for (const name of this.names) {
      if (this.shown.includes(name) || this.elsewhere.has(name)) continue;
      try {
        this.elsewhere.set(name, (await this.source.events(name)).filter((event) => event.state !== "ended"));
      } catch {
        continue; // of a run that nobody asked for; choosing it says what is wrong
      }
      if (stale()) return;
      this.listRuns();
    }
  }

  async loadEvents(stale) {
    const found = await Promise.all(this.shown.map(async (run) => (await this.source.events(run)).map((event) => ({ ...event, run }))));
    if (stale()) return;
    this.events = found.flat().sort((one, other) => one.step - other.step);
    this.listEvents();
    await this.paint();
  }

  /** Read again what may have grown. */
  async refresh() {
    if (this.refreshing) return;
    this.refreshing = true;
    await this.guard(async () => {
      this.names = await this.source.runs();
      const atEnd = this.step === this.steps.at(-1);
      let changed = false;
      for (const name of this.shown.filter((name) => this.names.includes(name))) {
        const meta = await this.source.meta(name);
        if (JSON.stringify(meta) === JSON.stringify(this.metas.get(name))) continue;
        changed = true;
        this.metas.set(name, meta);
        this.frames.forget(name);
      }
      if (!this.shown.length) return this.show(this.names.slice(0, 4));
      this.elsewhere.clear();
      this.listRuns();
      if (!changed) {
        const { showing } = this;
        return this.lookElsewhere(() => showing !== this.showing);
      }
      if (atEnd && !this.playing) this.step = null;
      return this.show(this.shown);
    });
    this.refreshing = false;
    this.refreshed = performance.now();
  }

  async guard(work) {
    try {
      this.banner.hidden = true;
      await work();
    } catch (error) {
      this.say(error.message);
    }
  }

  say(text) {
    this.banner.textContent = text;
    this.banner.hidden = false;
  }

  // ------------------------------------------------------------------------------------------------------ controls

  listRuns() {
    const focused = [...this.runList.querySelectorAll("input")].find((box) => box === document.activeElement)?.value;
    const missed = this.names.filter((name) => !this.shown.includes(name) && this.elsewhere.get(name)?.length).length;
    const count = `${this.shown.length} of ${this.names.length} shown` +
      (missed ? `; ${missed} of those not shown ${missed === 1 ? "has" : "have"} events` : "");
    this.runList.replaceChildren(...this.names.map((name) => {
      const box = h("input", { type: "checkbox", value: name, checked: this.shown.includes(name), onchange: () => {
        const names = box.checked ? [...this.shown, name] : this.shown.filter((other) => other !== name);
        this.guard(() => this.show(names));
      } });
      const chip = h("span", { className: "chip" });
      chip.style.background = this.shown.includes(name) ? this.colourOf(name) : "transparent";
      const events = this.shown.includes(name) ? [] : this.elsewhere.get(name) ?? [];
      const grave = events.some(({ severity }) => severity === "critical");
      return h("label", {}, box, chip, name, events.length
        ? h("span", { className: `mark ${grave ? "critical" : "warning"}` }, `⚑ ${plural(events.length, "event")}`) : "");
    }), h("span", { className: missed ? "count alarm" : "count" }, this.names.length > 1 ? count : ""));
    if (focused !== undefined) [...this.runList.querySelectorAll("input")].find((box) => box.value === focused)?.focus();
  }

  colourOf(run) {
    return LINES[Math.max(0, this.shown.indexOf(run)) % LINES.length];
  }

  offer() {
    const metas = this.shown.map((name) => this.metas.get(name));
    const statistics = new Map(metas.flatMap((meta) => meta.statistics.map((one) => [one.name, one])));
    this.statisticSelect.replaceChildren(...[...statistics.values()].map((one) =>
      h("option", { value: one.name, title: one.definition }, one.label + (one.unit ? ` [${one.unit}]` : ""))));
    if (!statistics.has(this.statistic)) this.statistic = statistics.keys().next().value ?? null;
    this.statisticSelect.value = this.statistic;
    this.steps = [...new Set(metas.flatMap((meta) => meta.steps))].sort((one, other) => one - other);
    if (this.step === null || !this.steps.length) this.step = this.steps.at(-1) ?? null;
    const scalars = [...new Set(metas.flatMap((meta) => meta.scalars))];
    if (this.loss === undefined || (this.loss && !scalars.includes(this.loss))) {
      this.loss = scalars.find((tag) => /train.*loss|loss.*train/i.test(tag)) ?? scalars.find((tag) => /loss/i.test(tag)) ?? "";
    }
    this.lossSelect.replaceChildren(h("option", { value: "" }, "nothing"), ...scalars.map((tag) => h("option", { value: tag }, tag)));
    this.lossSelect.value = this.loss;
  }

  describe(meta, name) {
    return meta.statistics.find((one) => one.name === name);
  }

  buildMaps() {
    this.maps = new Map(this.shown.map((name) => [name, new HeatMap(this, this.metas.get(name))]));
    for (const [name, map] of this.maps) map.element.querySelector(".chip").style.background = this.colourOf(name);
    this.maps_.replaceChildren(...[...this.maps.values()].map((map) => map.element));
  }

  setStatistic(name) {
    this.statistic = name;
    this.statisticSelect.value = name;
    return this.guard(() => this.paint());
  }

  setStep(step) {
    if (!this.steps.length) return undefined;
    this.step = this.steps[Math.max(0, lastAt(this.steps, step))];
    return this.guard(() => this.paint());
  }

  move(offset) {
    return this.setStep(this.steps[clamp(lastAt(this.steps, this.step) + offset, 0, this.steps.length - 1)]);
  }

  async play(on) {
    this.playing = on;
    this.round = (this.round ?? 0) + 1;
    const { round } = this;
    const going = () => this.playing && this.round === round; // a second start must not double the pace
    this.playButton.textContent = on ? "Pause" : "Play";
    if (on && this.step === this.steps.at(-1)) await this.setStep(this.steps[0]);
    const pause = Math.max(40, Math.min(250, 20_000 / Math.max(1, this.steps.length))); // a run in about 20 s
    while (going() && this.step !== this.steps.at(-1)) {
      await new Promise((resolve) => { setTimeout(resolve, pause); });
      if (going()) await this.move(1);
    }
    if (going()) this.play(false);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || this.help.open) return;
    if (event.target.matches("select, input[type=range], textarea") && /^(Arrow|Home|End|Page)/.test(event.key)) return;
    if (event.target.matches("select, textarea, button, a, input[type=checkbox]") && [" ", "Enter"].includes(event.key)) return;
    if (event.target.matches("select")) return; // letters choose an option
    const statistics = [...this.statisticSelect.options].map((option) => option.value);
    const turn = (offset) => this.setStatistic(
      statistics[(statistics.indexOf(this.statistic) + offset + statistics.length) % statistics.length]);
    const actions = {
      ArrowLeft: () => this.walk(0, -1), ArrowRight: () => this.walk(0, 1),
      ArrowUp: () => this.walk(-1, 0), ArrowDown: () => this.walk(1, 0),
      ",": () => this.move(-1), ".": () => this.move(1),
      Home: () => this.setStep(this.steps[0]), End: () => this.setStep(this.steps.at(-1)),
      " ": () => this.play(!this.playing), "[": () => turn(-1), "]": () => turn(1),
      p: () => this.jump(-1), n: () => this.jump(1),
      ...(this.source.fixed ? {} : { r: () => this.refresh() }), d: () => this.toggleTheme(), "?": () => this.help.showModal(),
    };
    if (!(event.key in actions) || !this.shown.length) return;
    event.preventDefault();
    actions[event.key]();
  }

  walk(down, right) {
    const meta = this.selected && this.metas.get(this.selected.run);
    if (!meta) return this.selectWorst();
    const row = meta.layers.indexOf(this.selected.layer);
    const layer = clamp(row + down, 0, meta.layers.length - 1);
    const head = clamp(this.selected.head + right, 0, Math.max(0, meta.heads[layer] - 1));
    return this.select({ run: meta.name, layer: meta.layers[layer], head });
  }

  /** Go to the event before or after the last one gone to, or after the present step. */
  jump(offset) {
    if (!this.events.length) return;
    const now = this.events.indexOf(this.event);
    const next = now >= 0 ? now + offset : offset > 0
      ? this.events.findIndex((event) => event.step >= this.step) : this.events.findLastIndex((event) => event.step <= this.step);
    this.go(this.events[clamp(next, 0, this.events.length - 1)]);
  }

  go(event) {
    this.event = event;
    this.setStep(event.step);
    this.select({ run: event.run, layer: event.layer, head: event.head });
    for (const item of this.eventList.children) item.classList.toggle("now", item.event === event);
  }

  /** Show the head and step of a link such as #run=...&layer=...&head=3&step=120. */
  async follow(hash) {
    const link = parse(hash);
    if (!link || !this.names.includes(link.run)) return;
    if (!this.shown.includes(link.run)) await this.guard(() => this.show([...this.shown, link.run]));
    this.setStep(link.step);
    this.select(link);
  }

  toggleTheme() {
    const dark = variable(this.element, "--dark") === "1";
    this.element.dataset.theme = dark ? "light" : "dark";
    this.repaint();
  }

  repaint() {
    for (const map of this.maps.values()) map.draw();
    for (const { plot } of this.plots) plot.redraw(false);
  }

  resize() {
    for (const map of this.maps.values()) map.draw();
    for (const { plot, card } of this.plots) plot.setSize({ width: Math.max(200, card.body.clientWidth), height: card.height });
  }

  // ------------------------------------------------------------------------------------------------------- painting

  /** Paint every shown run at the present step; a later call overtakes an earlier one. */
  async paint() {
    this.turn += 1;
    const { turn } = this;
    const index = lastAt(this.steps, this.step);
    Object.assign(this.slider, { max: Math.max(0, this.steps.length - 1), value: Math.max(0, index) });
    this.slider.setAttribute("aria-valuetext", `step ${this.step}`);
    this.stepLabel.textContent = this.step === null ? "" : `${this.step} (${index + 1} of ${this.steps.length})`;
    this.explain();
    const found = await Promise.all([...this.maps.values()].map(async (map) => {
      const place = lastAt(map.meta.steps, this.step);
      if (place < 0 || !this.describe(map.meta, this.statistic)) return null;
      const { statistic, step } = this;
      const frame = { ...(await this.frames.get(map.meta, statistic, place)), statistic, step };
      const gaps = map.meta.heads.some((heads, layer) => Array.from({ length: heads }, (_, head) => map.value(layer, head, frame)).some(Number.isNaN));
      const counted = gaps && this.describe(map.meta, "nonfinite");
      return { frame, counts: counted ? await this.frames.get(map.meta, "nonfinite", place) : null };
    }));
    if (turn !== this.turn) return;
    [...this.maps.values()].forEach((map, place) => {
      Object.assign(map, found[place] ?? { frame: null, counts: null });
      map.open = this.openEvents(map.meta);
      map.draw();
      map.summarise();
    });
    if ([...this.maps.values()].some((map) => map.allBroken().count)) {
      this.legend.append(h("span", { className: "key broken" }), BROKEN);
    }
    this.describeSelected();
    for (const { plot } of this.plots) plot.showNow();
  }

  explain() {
    const metas = this.shown.map((name) => this.metas.get(name));
    const statistic = metas.map((meta) => this.describe(meta, this.statistic)).find(Boolean);
    this.definition.textContent = "";
    this.legend.replaceChildren();
    if (!statistic) return;
    const worse = { up: " Higher is worse.", down: " Lower is worse." }[statistic.worse] ?? "";
    this.definition.textContent = `${statistic.label}: ${statistic.definition}${statistic.unit ? `, in ${statistic.unit}` : ""}.${worse}`;
    const bar = h("span", { className: "bar" });
    const ramp = (stops, from, to) => stops.map((rgb, index) =>
      `rgb(${rgb.join(",")}) ${(100 * (from + ((to - from) * index) / (stops.length - 1))).toFixed(2)}%`);
    const limit = statistic.threshold === null ? null : positions(statistic.scale)(statistic.threshold);
    const stops = limit === null ? ramp(VIRIDIS, 0, 1) : [...ramp(BELOW, 0, limit), ...ramp(ABOVE, limit, 1)];
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    if (statistic.threshold !== null) {
      const mark = h("span", { className: "limit", title: `limit ${format(statistic.threshold)}` });
      mark.style.left = `${100 * limit}%`;
      bar.append(mark);
    }
    const kind = { log: "logarithmic", signed: "signed logarithmic", linear: "linear" }[statistic.scale.kind];
    this.legend.append(format(statistic.scale.low), bar, format(statistic.scale.high),
      h("span", { className: "words" }, kind + (statistic.threshold === null ? "" : `, dot: above the limit ${format(statistic.threshold)}`)),
      h("span", { className: "key warning" }), "warning", h("span", { className: "key critical" }), "critical",
      selectedKey(), "selected", h("span", { className: "key unknown" }), "not measured");
  }

  /** Heads with an event that is open at the present step: "layer:head" -> its severity, and since which step. */
  openEvents(meta) {
    const kinds = new Map(); // a head may have an open event of each kind
    for (const event of this.events) {
      if (event.run !== meta.name || event.step > this.step) continue;
      const layer = meta.layers.indexOf(event.layer);
      if (layer < 0) continue;
      const key = `${layer}:${event.head}`;
      if (!kinds.has(key)) kinds.set(key, new Map());
      if (event.state === "ended") kinds.get(key).delete(event.kind);
      else kinds.get(key).set(event.kind, { kind: event.kind, severity: event.severity, since: event.step, message: event.message });
    }
    const open = new Map();
    for (const [key, events] of kinds) {
      const found = [...events.values()];
      if (found.length) {
        open.set(key, found.find(({ kind }) => kind === "nonfinite") || found.find(({ severity }) => severity === "critical") || found.at(-1));
      }
    }
    return open;
  }

  /** What was said of a run beside its events: a wrong scale, uniform attention, forecasts. */
  listNotes() {
    const notes = this.shown.flatMap((run) => (this.metas.get(run)?.notes ?? []).map((note) => ({ ...note, run })));
    this.noteList.replaceChildren(...notes.slice(0, 200).map(({ run, step, note }) => {
      const start = `step ${step}: `;
      return h("li", {}, this.shown.length > 1 ? h("span", { className: "of" }, `${run} `) : "", note.startsWith(start) ? note : start + note);
    }), ...(notes.length > 200 ? [h("li", {}, `and ${notes.length - 200} more`)] : []));
  }

  listEvents() {
    this.listNotes();
    const count = this.events.filter((event) => event.state !== "ended").length;
    this.eventTitle.textContent = this.events.length ? `Events (${this.events.length})` : "Events: none";
    this.eventTitle.title = `${count} opened or became critical`;
    const page = location.href.split("#")[0];
    this.eventList.replaceChildren(...this.events.slice(0, 2000).map((event) => {
      const { run, layer, head, step } = event;
      const link = h("a", { href: `${page}#${new URLSearchParams({ run, layer, head, step })}`, onclick: (click) => {
        if (click.ctrlKey || click.metaKey || click.shiftKey) return;
        click.preventDefault();
        this.go(event);
      } }, event.message || `step ${step}: head ${head} of ${layer}`);
      const word = event.state === "ended" ? "ended" : event.severity;
      const item = h("li", { className: event.state === "ended" ? "ended" : event.severity },
        h("span", { className: "badge" }, word), this.shown.length > 1 ? h("span", { className: "of" }, `${run} `) : "",
        link);
      item.event = event;
      return item;
    }));
  }

  // --------------------------------------------------------------------------------------------------------- a head

  selectWorst() {
    const event = this.events.find((one) => one.state !== "ended");
    if (event) return this.select({ run: event.run, layer: event.layer, head: event.head });
    const [map] = this.maps.values();
    if (!map) return undefined;
    const statistic = this.describe(map.meta, this.statistic);
    const worst = statistic && map.worst(statistic.worse);
    return this.select({ run: map.meta.name, ...(worst ? { layer: map.meta.layers[worst.layer], head: worst.head } : map.first()) });
  }

  select({ run, layer, head }) {
    this.selected = { run, layer, head };
    this.overtake();
    for (const map of this.maps.values()) map.draw();
    this.describeSelected();
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.detail(), 120); // not for every head that the arrow keys pass
  }

  describeSelected() {
    const { selected } = this;
    const map = selected && this.maps.get(selected.run);
    const having = [...this.maps.values()].map((one) => ({ map: one, row: selected ? one.meta.layers.indexOf(selected.layer) : -1 }))
      .filter(({ map: one, row }) => row >= 0 && selected.head < one.meta.heads[row]);
    const own = having.find((one) => one.map === map);
    this.readout.textContent = !own ? "" : this.maps.size === 1 ? `${map.words(own.row, selected.head)}, shown: step ${this.step}`
      : `${selected.layer}, head ${selected.head}, shown: step ${this.step} · ` +
        having.map(({ map: one, row }) => `${one.meta.name}: ${one.reading(row, selected.head)}`).join(" · ");
  }

  /** Whatever is being drawn is not wanted any more: no chart of it may come after those of the next. */
  overtake() {
    this.attempt += 1;
    this.charts.dataset.ready = "false";
  }

  clearCharts() {
    this.plots.forEach(({ plot }) => plot.destroy());
    this.plots = [];
    for (const element of [this.charts, this.causes, this.flat, this.keys]) element.replaceChildren();
  }

  /** Load and draw the lines of the selected head in every shown run that has it; a later call overtakes an earlier one. */
  async detail() {
    clearTimeout(this.waiting);
    const { selected } = this;
    if (!selected || !globalThis.uPlot) return;
    this.overtake();
    this.drawing = selected;
    const { attempt } = this;
    const stale = () => attempt !== this.attempt;
    const start = performance.now();
    await this.guard(async () => {
      try {
        await this.drawDetail(selected, stale);
      } catch (error) {
        if (!stale()) throw error;
      }
      if (stale()) return;
      this.charts.dataset.ready = "true";
      this.cost = performance.now() - start;
    });
  }

  async drawDetail(selected, stale) {
    const places = this.shown
      .map((name) => ({ meta: this.metas.get(name), row: this.metas.get(name)?.layers.indexOf(selected.layer) ?? -1 }))
      .filter(({ meta, row }) => row >= 0 && selected.head < meta.heads[row]);
    const losses = [];
    for (const { meta } of places) {
      if (!this.loss || !meta.scalars.includes(this.loss)) continue;
      losses.push({ ...(await this.source.scalar(meta.name, this.loss)), colour: this.colourOf(meta.name) });
    }
    const lines = new Map(places.map(({ meta }) => [meta.name, {}]));
    const load = async (name) => {
      await Promise.all(places.map(async ({ meta, row }) => {
        if (!this.describe(meta, name) || lines.get(meta.name)[name]) return;
        const found = await this.source.line(meta.name, row, selected.head, [name]);
        lines.get(meta.name)[name] = found.statistics[name];
      }));
    };
    await Promise.all(["scale_ratio", "nonfinite"].map(load)); // what is said of them stands above and beside the charts
    if (stale()) return;
    this.clearCharts();
    this.detailTitle.textContent = `${selected.layer}, head ${selected.head}`;
    const dims = [...new Set(places.map(({ meta, row }) => meta.head_dims[row]).filter((dim) => dim !== null))];
    if (dims.length) this.detailTitle.append(h("small", {}, ` d_k ${dims.join(", ")}`));
    this.explainLines(places, losses);
    this.sayCauses(places, lines);
    const names = [...new Set(places.flatMap(({ meta }) => meta.statistics.map((one) => one.name)))];
    const parts = ["qk_std", ...FACTORS.map(([factor]) => factor)];
    // Their places are taken before the rest is drawn, or it would move when they come.
    const growth = places.filter(({ meta }) => parts.every((name) => this.describe(meta, name)))
      .map(({ meta }) => ({ meta, card: this.factorCard(meta, endOf(lines.get(meta.name).scale_ratio)) }));
    const wanted = [...names.slice(0, 1), ...FACTORS.map(([name]) => name), "qk_std", ...names]
      .filter((name, index, list) => names.includes(name) && list.indexOf(name) === index);
    for (const name of wanted) {
      await load(name);
      if (stale()) return;
      const found = places.map(({ meta }) => lines.get(meta.name)[name]).filter(Boolean);
      if (!this.sayFlat(name, found)) this.drawLine(name, places, lines, losses);
      while (growth.length && parts.every((one) => lines.get(growth[0].meta.name)[one])) {
        const { meta, card } = growth.shift();
        this.drawFactors(meta, lines.get(meta.name), card);
      }
    }
  }

  /** What the lines across the charts mean. */
  explainLines(places, losses) {
    const key = (style, text) => h("span", { className: "part" }, h("span", { className: `stroke ${style}` }), text);
    const runs = places.length < 2 ? [] : places.map(({ meta }) => {
      const chip = h("span", { className: "chip" });
      chip.style.background = this.colourOf(meta.name);
      return h("span", { className: "part" }, chip, meta.name);
    });
    this.keys.replaceChildren(...runs, key("warning", "warning"), key("critical", "critical"), key("ended", "ended"),
      key("now", "the step shown"), key("level", "the limit"), ...(losses.length ? [key("loss", this.loss)] : []));
  }

  /** Why the logits of the selected head are large: the last event of each run, and a scale that is not the usual one. */
  sayCauses(places, lines) {
    const said = [];
    for (const { meta } of places) {
      const of = this.shown.length > 1 ? `${meta.name}: ` : "";
      const scale = endOf(lines.get(meta.name).scale_ratio);
      if (unusual(scale)) said.push(h("p", { className: "alarm scale-off" }, `${of}${scaleWords(scale)}`));
      const event = this.marks([meta.name]).findLast((one) => one.state !== "ended");
      if (!event) continue;
      const last = this.marks([meta.name]).at(-1);
      const when = `${event.severity} since step ${event.step}${last === event ? "" : `, ended at step ${last.step}`}`;
      const message = (event.message || "").replace(`step ${event.step}: `, "");
      said.push(h("p", { className: event.severity }, `${of}${when}${message && ": "}${message}`));
    }
    this.causes.replaceChildren(...said);
  }

  /** Say instead of drawing what is the same throughout; tell whether that was done. */
  sayFlat(name, found) {
    const known = found.flatMap(({ values }) => values.filter((value) => value !== null));
    if (!["nonfinite", "scale_ratio"].includes(name) || !known.length) return false;
    const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
    if (name === "nonfinite" ? high > 0 : high > low * 1.005) return false;
    this.flat.append(this.flat.firstChild ? "; " : "Without a chart: ",
      name === "nonfinite" ? "nonfinite is 0 throughout" : `scale ratio (scale·√d_k) is ${short(high, 3)} throughout`);
    return true;
  }

  card(title, hint, height, wide = false) {
    const card = { body: h("div", { className: "plot" }), reading: h("span", { className: "reading" }), height };
    card.element = h("figure", { className: wide ? "wide" : "" }, h("figcaption", { title: hint }, h("b", {}, title), card.reading), card.body);
    this.charts.insertBefore(card.element, wide ? this.charts.querySelector("figure:not(.wide)") : null);
    return card;
  }

  marks(runs) {
    return this.events.filter((event) => runs.includes(event.run) && event.layer === this.selected.layer && event.head === this.selected.head);
  }

  drawLine(name, places, lines, losses) {
    const chosen = places.filter(({ meta }) => lines.get(meta.name)[name]);
    const statistic = chosen.map(({ meta }) => this.describe(meta, name)).find(Boolean);
    const card = this.card(statistic.label + (statistic.unit ? ` [${statistic.unit}]` : ""), statistic.definition, 150);
    card.element.dataset.statistic = name;
    const drawn = chosen.map(({ meta }) => {
      const counts = lines.get(meta.name).nonfinite;
      const broken = new Set(counts?.steps.filter((_, index) => counts.values[index] > 0));
      return { ...lines.get(meta.name)[name], colour: this.colourOf(meta.name), broken };
    });
    const plot = lineChart(this, card, statistic, drawn, losses, this.marks(chosen.map(({ meta }) => meta.name)));
    this.plots.push({ plot, card, name });
  }

  factorCard(meta, scale) {
    const card = this.card("What grew: the factors of the logit std", "qk_std = scale·√d_k × query norm × key norm × alignment; " +
      "each band is what a factor has added since the first step, on a logarithmic axis, the line is the whole", 210, true);
    card.element.dataset.factors = meta.name;
    card.body.style.minHeight = `${card.height}px`;
    card.words = h("p", { className: "growth" });
    card.element.append(unusual(scale) ? h("p", { className: "alarm scale-off" }, scaleWords(scale)) : "", card.words);
    card.element.querySelector("figcaption").append(...FACTORS.map(([, label, colour]) => {
      const chip = h("span", { className: "chip" });
      chip.style.background = colour;
      return h("span", { className: "part" }, chip, label);
    }), this.shown.length > 1 ? h("span", { className: "of" }, meta.name) : "");
    return card;
  }

  drawFactors(meta, lines, card) {
    const { steps } = lines.qk_std;
    const grown = ({ steps: own, values }) => {
      const at = new Map(own.map((step, index) => [step, values[index]]));
      const start = steps.map((step) => at.get(step)).find((value) => value > 0);
      return steps.map((step) => (at.get(step) > 0 ? Math.log10(at.get(step) / start) : null));
    };
    const factors = FACTORS.map(([name, label, colour]) => ({ label, colour, steps, values: grown(lines[name]) }));
    const plot = factorChart(this, card, factors, { values: grown(lines.qk_std) }, this.marks([meta.name]));
    this.plots.push({ plot, card, name: "factors" });
    const last = steps.findLastIndex((_, index) => factors.every(({ values }) => values[index] !== null));
    if (last < 0) return;
    const now = (name) => format(lines[name].values[lines[name].steps.indexOf(steps[last])]);
    card.words.textContent = `Step ${steps[0]} to ${steps[last]}: logit std ${times(grown(lines.qk_std)[last] ?? 0)} = ` +
      factors.map(({ label, values }) => `${label} ${times(values[last])}`).join(" · ") +
      `. ${steps[last] === meta.steps.at(-1) ? "At the end" : `At step ${steps[last]}, the last with these numbers,`} ${now("qk_std")} = ${FACTORS.map(([name, label]) => `${label} ${now(name)}`).join(" · ")}.`;
  }
}

const endOf = (line) => line?.values.findLast((value) => value !== null) ?? null;
const unusual = (scale) => scale !== null && scale !== undefined && (scale < 0.8 || scale > 1.2);
const scaleWords = (scale) => `scale·√d_k is ${short(scale, 3)}, textbook 1: ` +
  (scale > 1 ? "the logits are that many times larger than with the usual 1/√d_k."
    : "the logits are smaller by that factor than with the usual 1/√d_k.");

function parse(hash) {
  const query = new URLSearchParams(hash.replace(/^#/, ""));
  if (!["run", "layer", "head", "step"].every((name) => query.has(name))) return null;
  return { run: query.get("run"), layer: query.get("layer"), head: Number(query.get("head")), step: Number(query.get("step")) };
}

// ------------------------------------------------------------------------------------------------------------- entry

/**
 * Show the view in an element. Returns what scripts can read: `state()`, `cells(run)`, and `app`.
 *
 * The element gets the same as its property `attention`.
 */
export function mount(element, source) {
  const app = new App(element, source);
  const handle = {
    app,
    cells: (run) => app.maps.get(run).cells(),
    state: () => ({
      runs: app.shown, statistic: app.statistic, step: app.step, steps: app.steps, selected: app.selected, playing: app.playing,
      painted: [...app.maps.values()].map(({ frame }) => frame && { statistic: frame.statistic, step: frame.step }),
      events: app.events.length, charts: app.plots.map(({ name }) => name), drawn: app.charts.dataset.ready === "true",
    }),
    ready: app.start(),
  };
  element.attention = handle;
  return handle;
}

/** Follow TensorBoard's own light or dark, which is a class of the page around the iframe. */
function followTheme(element, repaint) {
  let outer;
  try {
    outer = window.parent !== window ? window.parent.document.body : null;
  } catch {
    return; // framed by another site
  }
  if (!outer) return;
  const apply = () => {
    element.dataset.theme = outer.classList.contains("dark-mode") ? "dark" : "light";
    repaint();
  };
  new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
  apply();
}

/** Called by TensorBoard in the plugin's iframe. */
export async function render() {
  const here = (name) => new URL(name, import.meta.url).href;
  const loaded = (element) => new Promise((resolve, reject) => {
    element.addEventListener("load", resolve);
    element.addEventListener("error", () => reject(new Error(`${element.href || element.src} did not load`)));
    document.head.append(element);
  });
  const styles = ["uPlot.min.css", "index.css"].map((name) => loaded(h("link", { rel: "stylesheet", href: here(name) })));
  const library = loaded(h("script", { src: here("uPlot.iife.min.js") }));
  await Promise.all([...styles, library]);
  document.title = "Attention";
  const handle = mount(document.body, httpSource(import.meta.url));
  followTheme(document.body, () => handle.app.repaint());
  await handle.ready;
}
