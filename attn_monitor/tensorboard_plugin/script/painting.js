/** Painting the shown runs at the present step, and saying what they show. */

import { h, lastAt } from "./helpers.js";
import { BROKEN, format } from "./words.js";
import { ABOVE, BELOW, positions, VIRIDIS } from "./colours.js";
import { selectedKey } from "./marks.js";
import { summarise } from "./summary.js";
import { HeatMap } from "./map.js";
import { openEvents } from "./events.js";

/** A heat map for each shown run. */
export function buildMaps(app) {
  app.maps = new Map(app.shown.map((name) => [name, new HeatMap(app, app.metas.get(name))]));
  for (const [name, map] of app.maps) map.element.querySelector(".chip").style.background = app.colourOf(name);
  app.maps_.replaceChildren(...[...app.maps.values()].map((map) => map.element));
}

/** Paint every shown run at the present step; a later call overtakes an earlier one. */
export async function paint(app) {
  app.turn += 1;
  const { turn } = app;
  const index = lastAt(app.steps, app.step);
  Object.assign(app.slider, { max: Math.max(0, app.steps.length - 1), value: Math.max(0, index) });
  app.slider.setAttribute("aria-valuetext", `step ${app.step}`);
  app.stepLabel.textContent = app.step === null ? "" : `${app.step} (${index + 1} of ${app.steps.length})`;
  explain(app);
  const found = await Promise.all([...app.maps.values()].map(async (map) => {
    const place = lastAt(map.meta.steps, app.step);
    if (place < 0 || !app.describe(map.meta, app.statistic)) return null;
    const { statistic, step } = app;
    const frame = { ...(await app.frames.get(map.meta, statistic, place)), statistic, step };
    const gaps = map.meta.heads.some((heads, layer) => Array.from({ length: heads }, (_, head) => map.value(layer, head, frame)).some(Number.isNaN));
    const counted = gaps && app.describe(map.meta, "nonfinite");
    return { frame, counts: counted ? await app.frames.get(map.meta, "nonfinite", place) : null };
  }));
  if (turn !== app.turn) return;
  [...app.maps.values()].forEach((map, place) => {
    Object.assign(map, found[place] ?? { frame: null, counts: null });
    map.open = openEvents(app, map.meta);
    map.draw();
    summarise(map);
  });
  if ([...app.maps.values()].some((map) => map.allBroken().count)) {
    app.legend.append(h("span", { className: "key broken" }), BROKEN);
  }
  describeSelected(app);
  for (const { plot } of app.plots) plot.showNow();
}

/** What the statistic is, and what its colours and marks mean. */
function explain(app) {
  const metas = app.shown.map((name) => app.metas.get(name));
  const statistic = metas.map((meta) => app.describe(meta, app.statistic)).find(Boolean);
  app.definition.textContent = "";
  app.legend.replaceChildren();
  if (!statistic) return;
  const worse = { up: " Higher is worse.", down: " Lower is worse." }[statistic.worse] ?? "";
  app.definition.textContent = `${statistic.label}: ${statistic.definition}${statistic.unit ? `, in ${statistic.unit}` : ""}.${worse}`;
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
  app.legend.append(format(statistic.scale.low), bar, format(statistic.scale.high),
    h("span", { className: "words" }, kind + (statistic.threshold === null ? "" : `, dot: above the limit ${format(statistic.threshold)}`)),
    h("span", { className: "key warning" }), "warning", h("span", { className: "key critical" }), "critical",
    selectedKey(), "selected", h("span", { className: "key unknown" }), "not measured");
}

/** The value of the selected head in every run that has it, below the maps. */
export function describeSelected(app) {
  const { selected } = app;
  const map = selected && app.maps.get(selected.run);
  const having = [...app.maps.values()].map((one) => ({ map: one, row: selected ? one.meta.layers.indexOf(selected.layer) : -1 }))
    .filter(({ map: one, row }) => row >= 0 && selected.head < one.meta.heads[row]);
  const own = having.find((one) => one.map === map);
  app.readout.textContent = !own ? "" : app.maps.size === 1 ? `${map.words(own.row, selected.head)}, shown: step ${app.step}`
    : `${selected.layer}, head ${selected.head}, shown: step ${app.step} · ` +
      having.map(({ map: one, row }) => `${one.meta.name}: ${one.reading(row, selected.head)}`).join(" · ");
}
