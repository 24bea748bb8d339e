/** The selected head: its charts, and why its logits are large. */

import { h } from "./helpers.js";
import { endOf, format, scaleWords, short, times, unusual } from "./words.js";
import { factorChart, lineChart } from "./charts.js";

const FACTORS = [
  ["scale_ratio", "scale·√d_k", "#7f7f7f"],
  ["q_rms", "query norm", "#4e9fd6"],
  ["k_rms", "key norm", "#f0a34b"],
  ["alignment", "alignment", "#5fb76a"],
];

/** Take away the charts and what is said beside them. */
export function clearCharts(app) {
  app.plots.forEach(({ plot }) => plot.destroy());
  app.plots = [];
  for (const element of [app.charts, app.causes, app.flat, app.keys]) element.replaceChildren();
}

/** Load and draw the lines of a head, until `stale()`: the important ones first. */
export async function drawDetail(app, selected, stale) {
  const places = app.shown
    .map((name) => ({ meta: app.metas.get(name), row: app.metas.get(name)?.layers.indexOf(selected.layer) ?? -1 }))
    .filter(({ meta, row }) => row >= 0 && selected.head < meta.heads[row]);
  const losses = [];
  for (const { meta } of places) {
    if (!app.loss || !meta.scalars.includes(app.loss)) continue;
    losses.push({ ...(await app.source.scalar(meta.name, app.loss)), colour: app.colourOf(meta.name) });
  }
  const lines = new Map(places.map(({ meta }) => [meta.name, {}]));
  const load = async (name) => {
    await Promise.all(places.map(async ({ meta, row }) => {
      if (!app.describe(meta, name) || lines.get(meta.name)[name]) return;
      const found = await app.source.line(meta.name, row, selected.head, [name]);
      lines.get(meta.name)[name] = found.statistics[name];
    }));
  };
  await Promise.all(["scale_ratio", "nonfinite"].map(load)); // what is said of them stands above and beside the charts
  if (stale()) return;
  clearCharts(app);
  app.detailTitle.textContent = `${selected.layer}, head ${selected.head}`;
  const dims = [...new Set(places.map(({ meta, row }) => meta.head_dims[row]).filter((dim) => dim !== null))];
  if (dims.length) app.detailTitle.append(h("small", {}, ` d_k ${dims.join(", ")}`));
  explainLines(app, places, losses);
  sayCauses(app, places, lines);
  const names = [...new Set(places.flatMap(({ meta }) => meta.statistics.map((one) => one.name)))];
  const parts = ["qk_std", ...FACTORS.map(([factor]) => factor)];
  // Their places are taken before the rest is drawn, or it would move when they come.
  const growth = places.filter(({ meta }) => parts.every((name) => app.describe(meta, name)))
    .map(({ meta }) => ({ meta, card: factorCard(app, meta, endOf(lines.get(meta.name).scale_ratio)) }));
  const wanted = [...names.slice(0, 1), ...FACTORS.map(([name]) => name), "qk_std", ...names]
    .filter((name, index, list) => names.includes(name) && list.indexOf(name) === index);
  for (const name of wanted) {
    await load(name);
    if (stale()) return;
    const found = places.map(({ meta }) => lines.get(meta.name)[name]).filter(Boolean);
    if (!sayFlat(app, name, found)) drawLine(app, name, places, lines, losses);
    while (growth.length && parts.every((one) => lines.get(growth[0].meta.name)[one])) {
      const { meta, card } = growth.shift();
      drawFactors(app, meta, lines.get(meta.name), card);
    }
  }
}

/** What the lines across the charts mean. */
function explainLines(app, places, losses) {
  const key = (style, text) => h("span", { className: "part" }, h("span", { className: `stroke ${style}` }), text);
  const runs = places.length < 2 ? [] : places.map(({ meta }) => {
    const chip = h("span", { className: "chip" });
    chip.style.background = app.colourOf(meta.name);
    return h("span", { className: "part" }, chip, meta.name);
  });
  app.keys.replaceChildren(...runs, key("warning", "warning"), key("critical", "critical"), key("ended", "ended"),
    key("now", "the step shown"), key("level", "the limit"), ...(losses.length ? [key("loss", app.loss)] : []));
}

/** Why the logits of the selected head are large: the last event of each run, and a scale that is not the usual one. */
function sayCauses(app, places, lines) {
  const said = [];
  for (const { meta } of places) {
    const of = app.shown.length > 1 ? `${meta.name}: ` : "";
    const scale = endOf(lines.get(meta.name).scale_ratio);
    if (unusual(scale)) said.push(h("p", { className: "alarm scale-off" }, `${of}${scaleWords(scale)}`));
    const event = marksOf(app, [meta.name]).findLast((one) => one.state !== "ended");
    if (!event) continue;
    const last = marksOf(app, [meta.name]).at(-1);
    const when = `${event.severity} since step ${event.step}${last === event ? "" : `, ended at step ${last.step}`}`;
    const message = (event.message || "").replace(`step ${event.step}: `, "");
    said.push(h("p", { className: event.severity }, `${of}${when}${message && ": "}${message}`));
  }
  app.causes.replaceChildren(...said);
}

/** Say instead of drawing what is the same throughout; tell whether that was done. */
function sayFlat(app, name, found) {
  const known = found.flatMap(({ values }) => values.filter((value) => value !== null));
  if (!["nonfinite", "scale_ratio"].includes(name) || !known.length) return false;
  const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  if (name === "nonfinite" ? high > 0 : high > low * 1.005) return false;
  app.flat.append(app.flat.firstChild ? "; " : "Without a chart: ",
    name === "nonfinite" ? "nonfinite is 0 throughout" : `scale ratio (scale·√d_k) is ${short(high, 3)} throughout`);
  return true;
}

function makeCard(app, title, hint, height, wide = false) {
  const card = { body: h("div", { className: "plot" }), reading: h("span", { className: "reading" }), height };
  card.element = h("figure", { className: wide ? "wide" : "" }, h("figcaption", { title: hint }, h("b", {}, title), card.reading), card.body);
  app.charts.insertBefore(card.element, wide ? app.charts.querySelector("figure:not(.wide)") : null);
  return card;
}

function marksOf(app, runs) {
  return app.events.filter((event) => runs.includes(event.run) && event.layer === app.selected.layer && event.head === app.selected.head);
}

function drawLine(app, name, places, lines, losses) {
  const chosen = places.filter(({ meta }) => lines.get(meta.name)[name]);
  const statistic = chosen.map(({ meta }) => app.describe(meta, name)).find(Boolean);
  const card = makeCard(app, statistic.label + (statistic.unit ? ` [${statistic.unit}]` : ""), statistic.definition, 150);
  card.element.dataset.statistic = name;
  const drawn = chosen.map(({ meta }) => {
    const counts = lines.get(meta.name).nonfinite;
    const broken = new Set(counts?.steps.filter((_, index) => counts.values[index] > 0));
    return { ...lines.get(meta.name)[name], colour: app.colourOf(meta.name), broken };
  });
  const plot = lineChart(app, card, statistic, drawn, losses, marksOf(app, chosen.map(({ meta }) => meta.name)));
  app.plots.push({ plot, card, name });
}

function factorCard(app, meta, scale) {
  const card = makeCard(app, "What grew: the factors of the logit std", "qk_std = scale·√d_k × query norm × key norm × alignment; " +
    "each band is what a factor has added since the first step, on a logarithmic axis, the line is the whole", 210, true);
  card.element.dataset.factors = meta.name;
  card.body.style.minHeight = `${card.height}px`;
  card.words = h("p", { className: "growth" });
  card.element.append(unusual(scale) ? h("p", { className: "alarm scale-off" }, scaleWords(scale)) : "", card.words);
  card.element.querySelector("figcaption").append(...FACTORS.map(([, label, colour]) => {
    const chip = h("span", { className: "chip" });
    chip.style.background = colour;
    return h("span", { className: "part" }, chip, label);
  }), app.shown.length > 1 ? h("span", { className: "of" }, meta.name) : "");
  return card;
}

function drawFactors(app, meta, lines, card) {
  const { steps } = lines.qk_std;
  const grown = ({ steps: own, values }) => {
    const at = new Map(own.map((step, index) => [step, values[index]]));
    const start = steps.map((step) => at.get(step)).find((value) => value > 0);
    return steps.map((step) => (at.get(step) > 0 ? Math.log10(at.get(step) / start) : null));
  };
  const factors = FACTORS.map(([name, label, colour]) => ({ label, colour, steps, values: grown(lines[name]) }));
  const plot = factorChart(app, card, factors, { values: grown(lines.qk_std) }, marksOf(app, [meta.name]));
  app.plots.push({ plot, card, name: "factors" });
  const last = steps.findLastIndex((_, index) => factors.every(({ values }) => values[index] !== null));
  if (last < 0) return;
  const now = (name) => format(lines[name].values[lines[name].steps.indexOf(steps[last])]);
  card.words.textContent = `Step ${steps[0]} to ${steps[last]}: logit std ${times(grown(lines.qk_std)[last] ?? 0)} = ` +
    factors.map(({ label, values }) => `${label} ${times(values[last])}`).join(" · ") +
    `. ${steps[last] === meta.steps.at(-1) ? "At the end" : `At step ${steps[last]}, the last with these numbers,`} ` +
    `${now("qk_std")} = ${FACTORS.map(([name, label]) => `${label} ${now(name)}`).join(" · ")}.`;
}
