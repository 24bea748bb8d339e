/** The events and notes of the shown runs: the list, which are open, and going from one to the next. */

import { clamp, h } from "./helpers.js";

/** Heads with an event that is open at the present step: "layer:head" -> its severity, and since which step. */
export function openEvents(app, meta) {
  const kinds = new Map(); // a head may have an open event of each kind
  for (const event of app.events) {
    if (event.run !== meta.name || event.step > app.step) continue;
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

/** List the events, with links that lead to their heads. */
export function listEvents(app) {
  listNotes(app);
  const count = app.events.filter((event) => event.state !== "ended").length;
  app.eventTitle.textContent = app.events.length ? `Events (${app.events.length})` : "Events: none";
  app.eventTitle.title = `${count} opened or became critical`;
  const page = location.href.split("#")[0];
  app.eventList.replaceChildren(...app.events.slice(0, 2000).map((event) => {
    const { run, layer, head, step } = event;
    const link = h("a", { href: `${page}#${new URLSearchParams({ run, layer, head, step })}`, onclick: (click) => {
      if (click.ctrlKey || click.metaKey || click.shiftKey) return;
      click.preventDefault();
      goTo(app, event);
    } }, event.message || `step ${step}: head ${head} of ${layer}`);
    const word = event.state === "ended" ? "ended" : event.severity;
    const item = h("li", { className: event.state === "ended" ? "ended" : event.severity },
      h("span", { className: "badge" }, word), app.shown.length > 1 ? h("span", { className: "of" }, `${run} `) : "",
      link);
    item.event = event;
    return item;
  }));
}

/** What was said of a run beside its events: a wrong scale, uniform attention, forecasts. */
function listNotes(app) {
  const notes = app.shown.flatMap((run) => (app.metas.get(run)?.notes ?? []).map((note) => ({ ...note, run })));
  app.noteList.replaceChildren(...notes.slice(0, 200).map(({ run, step, note }) => {
    const start = `step ${step}: `;
    return h("li", {}, app.shown.length > 1 ? h("span", { className: "of" }, `${run} `) : "", note.startsWith(start) ? note : start + note);
  }), ...(notes.length > 200 ? [h("li", {}, `and ${notes.length - 200} more`)] : []));
}

/** Go to the event before or after the last one gone to, or after the present step. */
export function jump(app, offset) {
  if (!app.events.length) return;
  const now = app.events.indexOf(app.event);
  const next = now >= 0 ? now + offset : offset > 0
    ? app.events.findIndex((event) => event.step >= app.step) : app.events.findLastIndex((event) => event.step <= app.step);
  goTo(app, app.events[clamp(next, 0, app.events.length - 1)]);
}

function goTo(app, event) {
  app.event = event;
  app.setStep(event.step);
  app.select({ run: event.run, layer: event.layer, head: event.head });
  for (const item of app.eventList.children) item.classList.toggle("now", item.event === event);
}
