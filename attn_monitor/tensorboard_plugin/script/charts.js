/** Lines of one head and what grew, drawn by uPlot. */

import { FONT, h, variable } from "./helpers.js";
import { BROKEN, format, short, times } from "./words.js";

/** Draw lines of one head, one for each run, the loss on the same x axis, events and the present step. */
export function lineChart(app, card, statistic, lines, losses, marks) {
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
export function factorChart(app, card, factors, total, marks) {
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
