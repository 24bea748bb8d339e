/** Tables of a run, kept by piece. */

import { clamp } from "./helpers.js";
import { decode } from "./sources.js";

/** Tables by piece: the steps around the one that is looked at, not the whole run. */
export class Frames {
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
