/** What a heat map shows, in a sentence above it. */

import { BROKEN, format, plural } from "./words.js";

/** How many heads are saturated or broken, since when, and the worst of them. */
export function summarise(map) {
  const statistic = map.app.describe(map.meta, map.app.statistic);
  const [first] = map.meta.steps;
  const early = first === undefined || map.app.step < first;
  map.note.hidden = Boolean(statistic) && !early;
  if (!statistic) map.note.textContent = `${map.app.statistic} was not measured in this run.`;
  if (early) {
    map.note.textContent = `No observation at or before step ${map.app.step}` +
      (first === undefined ? "." : `: the first of this run is at step ${first}.`);
    map.summary.textContent = "";
    map.summary.classList.remove("alarm");
    return;
  }
  summariseStep(map, statistic);
}

function summariseStep(map, statistic) {
  const counts = { warning: 0, critical: 0 };
  for (const { severity, kind } of map.open.values()) if (kind !== "nonfinite") counts[severity] += 1;
  const broken = map.allBroken();
  const first = map.app.events.find((event) => event.run === map.meta.name && event.state === "opened");
  const parts = [];
  if (broken.count) {
    const since = broken.since === null ? `at step ${map.app.step}` : `since step ${broken.since}`;
    parts.push(`${plural(broken.count, "head")} with ${BROKEN} ${since}`);
  }
  if (counts.warning + counts.critical) {
    parts.push(`${plural(counts.warning + counts.critical, "saturated head")} at step ${map.app.step}` +
      (counts.critical ? ` (${counts.critical} critical)` : ""));
  } else if (!broken.count) {
    const above = statistic && statistic.threshold !== null
      ? map.cells().flat().filter((value) => value > statistic.threshold).length : 0;
    parts.push(above ? `no event is open at step ${map.app.step}, but ${plural(above, "head")} above the limit`
      : `no saturated head at step ${map.app.step}`);
  }
  if (first) parts.push(`first ever: ${first.layer} head ${first.head}, step ${first.step}`);
  const worst = statistic && worstHead(map, statistic.worse);
  if (worst) {
    parts.push(`${statistic.worse === "up" ? "highest" : "lowest"} ${statistic.label}: ` +
      `${map.meta.layers[worst.layer]} head ${worst.head}, ${format(worst.value)}`);
  }
  map.summary.textContent = parts.join(" · ");
  map.summary.classList.toggle("alarm", counts.warning + counts.critical + broken.count > 0);
}

/** The head with the highest value, or the lowest one, as that is worse. */
export function worstHead(map, direction) {
  if (!direction) return null;
  let found = null;
  map.cells().forEach((row, layer) => row.forEach((value, head) => {
    if (Number.isNaN(value)) return;
    if (!found || (direction === "up" ? value > found.value : value < found.value)) found = { layer, head, value };
  }));
  return found;
}
