/** What the keys do. */

import { clamp } from "./helpers.js";
import { jump } from "./events.js";

export const HELP = [
  ["← → ↑ ↓", "another head"], [", .", "a step back, a step on"], ["Home End", "first, last step"],
  ["Space", "play, pause"], ["[ ]", "previous, next statistic"], ["p n", "previous, next event"],
  ["r", "read again"], ["d", "light, dark"], ["?", "these keys"],
];

/** Do what a key means, unless the element that has the focus has a use of its own for it. */
export function handleKey(app, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || app.help.open) return;
  if (event.target.matches("select, input[type=range], textarea") && /^(Arrow|Home|End|Page)/.test(event.key)) return;
  if (event.target.matches("select, textarea, button, a, input[type=checkbox]") && [" ", "Enter"].includes(event.key)) return;
  if (event.target.matches("select")) return; // letters choose an option
  const statistics = [...app.statisticSelect.options].map((option) => option.value);
  const turn = (offset) => app.setStatistic(
    statistics[(statistics.indexOf(app.statistic) + offset + statistics.length) % statistics.length]);
  const actions = {
    ArrowLeft: () => walk(app, 0, -1), ArrowRight: () => walk(app, 0, 1),
    ArrowUp: () => walk(app, -1, 0), ArrowDown: () => walk(app, 1, 0),
    ",": () => app.move(-1), ".": () => app.move(1),
    Home: () => app.setStep(app.steps[0]), End: () => app.setStep(app.steps.at(-1)),
    " ": () => app.play(!app.playing), "[": () => turn(-1), "]": () => turn(1),
    p: () => jump(app, -1), n: () => jump(app, 1),
    ...(app.source.fixed ? {} : { r: () => app.refresh() }), d: () => app.toggleTheme(), "?": () => app.help.showModal(),
  };
  if (!(event.key in actions) || !app.shown.length) return;
  event.preventDefault();
  actions[event.key]();
}

function walk(app, down, right) {
  const meta = app.selected && app.metas.get(app.selected.run);
  if (!meta) return app.selectWorst();
  const row = meta.layers.indexOf(app.selected.layer);
  const layer = clamp(row + down, 0, meta.layers.length - 1);
  const head = clamp(app.selected.head + right, 0, Math.max(0, meta.heads[layer] - 1));
  return app.select({ run: meta.name, layer: meta.layers[layer], head });
}
