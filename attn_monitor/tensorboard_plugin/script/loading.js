/** Which runs are shown: reading them, reading them again, and looking whether others have events. */

import { parseLink } from "./helpers.js";
import { listRuns, offer } from "./controls.js";
import { clearCharts } from "./detail.js";
import { listEvents } from "./events.js";
import { buildMaps, describeSelected } from "./painting.js";

/** Show the first runs, or the one a link names, and look again from time to time. */
export async function startRuns(app) {
  await app.guard(async () => {
    app.names = await app.source.runs();
    if (!app.names.length) {
      app.say("There is no attention data here yet. Train with Trainer(callbacks=[AttentionMonitor()]) and a " +
        "TensorBoardLogger that writes into this directory; this page looks again every 30 seconds.");
      return;
    }
    const link = parseLink(location.hash);
    const first = app.names.slice(0, 4);
    if (link && app.names.includes(link.run) && !first.includes(link.run)) first[0] = link.run;
    await app.show(first);
    if (link) app.follow(location.hash);
  });
  if (app.source.fixed) return;
  setInterval(() => {
    // What takes long to read is read again less often: at most a tenth of the time goes into it.
    if (!document.hidden && performance.now() - app.refreshed > Math.max(29_000, 10 * app.cost)) app.refresh();
  }, 30_000);
}

/** Show these runs, loading what is not known yet; a later call overtakes an earlier one. */
export async function showRuns(app, names) {
  app.showing += 1;
  const { showing } = app;
  const stale = () => showing !== app.showing;
  app.overtake();
  app.shown = app.names.filter((name) => names.includes(name));
  listRuns(app);
  if (!app.shown.length) {
    empty(app);
    app.say("No run is chosen.");
    return;
  }
  if (app.selected && !app.shown.includes(app.selected.run)) app.selected = null;
  await Promise.all(app.shown.filter((name) => !app.metas.has(name)).map(async (name) => {
    app.metas.set(name, await app.source.meta(name));
  }));
  if (stale()) return;
  buildMaps(app);
  offer(app);
  await app.paint();
  if (stale()) return;
  app.element.dataset.ready = "true";
  performance.mark("attn-painted");
  await loadEvents(app, stale);
  if (stale()) return;
  if (!app.selected) app.selectWorst();
  await app.detail();
  if (!stale()) await lookElsewhere(app, stale);
}

/** Nothing is chosen: nothing of what was may stay. */
function empty(app) {
  app.turn += 1;
  Object.assign(app, { maps: new Map(), events: [], steps: [], step: null, selected: null });
  app.maps_.replaceChildren();
  clearCharts(app);
  app.detailTitle.replaceChildren();
  listEvents(app);
  describeSelected(app);
  app.charts.dataset.ready = "true";
}

/** Tell which runs that are not shown have events. */
async function lookElsewhere(app, stale) {
  for (const name of app.names) {
    if (app.shown.includes(name) || app.elsewhere.has(name)) continue;
    try {
      app.elsewhere.set(name, (await app.source.events(name)).filter((event) => event.state !== "ended"));
    } catch {
      continue; // of a run that nobody asked for; choosing it says what is wrong
    }
    if (stale()) return;
    listRuns(app);
  }
}

async function loadEvents(app, stale) {
  const found = await Promise.all(app.shown.map(async (run) => (await app.source.events(run)).map((event) => ({ ...event, run }))));
  if (stale()) return;
  app.events = found.flat().sort((one, other) => one.step - other.step);
  listEvents(app);
  await app.paint();
}

/** Read again what may have grown. */
export async function refreshRuns(app) {
  if (app.refreshing) return;
  app.refreshing = true;
  await app.guard(async () => {
    app.names = await app.source.runs();
    const atEnd = app.step === app.steps.at(-1);
    let changed = false;
    for (const name of app.shown.filter((name) => app.names.includes(name))) {
      const meta = await app.source.meta(name);
      if (JSON.stringify(meta) === JSON.stringify(app.metas.get(name))) continue;
      changed = true;
      app.metas.set(name, meta);
      app.frames.forget(name);
    }
    if (!app.shown.length) return app.show(app.names.slice(0, 4));
    app.elsewhere.clear();
    listRuns(app);
    if (!changed) {
      const { showing } = app;
      return lookElsewhere(app, () => showing !== app.showing);
    }
    if (atEnd && !app.playing) app.step = null;
    return app.show(app.shown);
  });
  app.refreshing = false;
  app.refreshed = performance.now();
}
