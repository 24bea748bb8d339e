/** The state of the view and what changes it. What is drawn of it, lower modules know; they call back through `app`. */

import { clamp, lastAt, parseLink, variable } from "./helpers.js";
import { Frames } from "./frames.js";
import { worstHead } from "./summary.js";
import { drawDetail } from "./detail.js";
import { buildPage } from "./controls.js";
import { describeSelected, paint } from "./painting.js";
import { refreshRuns, showRuns, startRuns } from "./loading.js";

const LINES = ["#1f77b4", "#e6780b", "#2a9d3a", "#9467bd", "#b5485d", "#7f7f7f"];

export class App {
  constructor(element, source) {
    Object.assign(this, {
      element, source, frames: new Frames(source), syncKey: `attn-${Math.random()}`,
      names: [], shown: [], metas: new Map(), maps: new Map(), events: [], steps: [],
      statistic: null, step: null, selected: null, loss: undefined, playing: false, plots: [], turn: 0, refreshed: 0, cost: 0,
      showing: 0, attempt: 0, elsewhere: new Map(),
    });
    element.classList.add("attn");
    buildPage(this);
  }

  start() {
    return startRuns(this);
  }

  /** Show these runs, loading what is not known yet; a later call overtakes an earlier one. */
  show(names) {
    return showRuns(this, names);
  }

  /** Read again what may have grown. */
  refresh() {
    return refreshRuns(this);
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

  describe(meta, name) {
    return meta.statistics.find((one) => one.name === name);
  }

  colourOf(run) {
    return LINES[Math.max(0, this.shown.indexOf(run)) % LINES.length];
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

  selectWorst() {
    const event = this.events.find((one) => one.state !== "ended");
    if (event) return this.select({ run: event.run, layer: event.layer, head: event.head });
    const [map] = this.maps.values();
    if (!map) return undefined;
    const statistic = this.describe(map.meta, this.statistic);
    const worst = statistic && worstHead(map, statistic.worse);
    return this.select({ run: map.meta.name, ...(worst ? { layer: map.meta.layers[worst.layer], head: worst.head } : map.first()) });
  }

  select({ run, layer, head }) {
    this.selected = { run, layer, head };
    this.overtake();
    for (const map of this.maps.values()) map.draw();
    describeSelected(this);
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.detail(), 120); // not for every head that the arrow keys pass
  }

  /** Whatever is being drawn is not wanted any more: no chart of it may come after those of the next. */
  overtake() {
    this.attempt += 1;
    this.charts.dataset.ready = "false";
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
        await drawDetail(this, selected, stale);
      } catch (error) {
        if (!stale()) throw error;
      }
      if (stale()) return;
      this.charts.dataset.ready = "true";
      this.cost = performance.now() - start;
    });
  }

  /** Show the head and step of a link such as #run=...&layer=...&head=3&step=120. */
  async follow(hash) {
    const link = parseLink(hash);
    if (!link || !this.names.includes(link.run)) return;
    if (!this.shown.includes(link.run)) await this.guard(() => this.show([...this.shown, link.run]));
    this.setStep(link.step);
    this.select(link);
  }

  paint() {
    return paint(this);
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
}
