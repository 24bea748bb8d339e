/** The page around maps and charts: its elements, the runs and what can be chosen. */

import { h } from "./helpers.js";
import { plural } from "./words.js";
import { handleKey, HELP } from "./keys.js";

/** Make the elements of the page, which the others then fill, and listen to what happens to it. */
export function buildPage(app) {
  app.statisticSelect = h("select", { "aria-label": "Statistic", onchange: () => app.setStatistic(app.statisticSelect.value) });
  app.slider = h("input", { type: "range", min: 0, max: 0, step: 1, "aria-label": "Step",
    oninput: () => app.setStep(app.steps[Number(app.slider.value)]) });
  app.stepLabel = h("output", { className: "step" });
  app.playButton = h("button", { type: "button", className: "play", onclick: () => app.play(!app.playing) }, "Play");
  app.lossSelect = h("select", { "aria-label": "Scalar beside the lines", onchange: () => { app.loss = app.lossSelect.value; app.detail(); } });
  app.runList = h("div", { className: "runs", role: "group", "aria-label": "Runs" });
  app.banner = h("p", { className: "banner", role: "alert", hidden: true });
  app.definition = h("p", { className: "definition" });
  app.legend = h("div", { className: "legend" });
  app.maps_ = h("div", { className: "maps" });
  app.readout = h("p", { className: "readout", "aria-live": "polite" });
  app.toLines = h("button", { type: "button", hidden: true, onclick: () => app.detailTitle.scrollIntoView() }, "Its charts ↓");
  app.causes = h("div", { className: "causes" });
  app.flat = h("p", { className: "flat" });
  app.keys = h("p", { className: "keys" });
  app.detailTitle = h("h2", { className: "head" });
  app.charts = h("div", { className: "charts" });
  app.eventList = h("ol", { className: "events" });
  app.eventTitle = h("h2", {}, "Events");
  app.noteList = h("ul", { className: "notes", "aria-label": "Notes beside the events" });
  app.tip = h("div", { className: "tip", hidden: true });
  app.help = h("dialog", { className: "help" }, h("h2", {}, "Keys"),
    h("dl", {}, ...HELP.filter(([keys]) => keys !== "r" || !app.source.fixed).flatMap(([keys, meaning]) => [h("dt", {}, keys), h("dd", {}, meaning)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  app.element.replaceChildren(
    h("header", {},
      h("label", {}, "Statistic ", app.statisticSelect), app.playButton,
      h("label", { className: "time" }, "Step ", app.slider), app.stepLabel,
      h("label", {}, "Beside ", app.lossSelect),
      h("button", { type: "button", className: "refresh", title: "Read the runs again (r)", hidden: Boolean(app.source.fixed),
        onclick: () => app.refresh() }, "Refresh"),
      h("button", { type: "button", title: "Light or dark (d)", onclick: () => app.toggleTheme() }, "Theme"),
      h("button", { type: "button", title: "Keys (?)", onclick: () => app.help.showModal() }, "?")),
    app.runList, app.banner, h("div", { className: "scale" }, app.definition, app.legend), app.maps_,
    h("div", { className: "status" }, app.readout, app.toLines),
    h("div", { className: "below" }, h("section", {}, app.detailTitle, app.causes, app.keys, app.charts, app.flat),
      h("section", {}, app.eventTitle, app.noteList, app.eventList)),
    app.tip, app.help);
  app.element.addEventListener("keydown", (event) => handleKey(app, event));
  document.addEventListener("keydown", (event) => { if (event.target === document.body) handleKey(app, event); });
  window.addEventListener("hashchange", () => app.follow(location.hash));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.repaint());
  const watch = new IntersectionObserver(([entry]) => { // charts that a click would change out of sight
    app.toLines.hidden = entry.isIntersecting || entry.boundingClientRect.top < 0;
  }, { rootMargin: "0px 0px -120px" });
  watch.observe(app.detailTitle);
  let waiting = 0;
  new ResizeObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(() => app.resize(), 100);
  }).observe(app.element);
}

/** A box for each run, and which of those not shown have events. */
export function listRuns(app) {
  const focused = [...app.runList.querySelectorAll("input")].find((box) => box === document.activeElement)?.value;
  const missed = app.names.filter((name) => !app.shown.includes(name) && app.elsewhere.get(name)?.length).length;
  const count = `${app.shown.length} of ${app.names.length} shown` +
    (missed ? `; ${missed} of those not shown ${missed === 1 ? "has" : "have"} events` : "");
  app.runList.replaceChildren(...app.names.map((name) => {
    const box = h("input", { type: "checkbox", value: name, checked: app.shown.includes(name), onchange: () => {
      const names = box.checked ? [...app.shown, name] : app.shown.filter((other) => other !== name);
      app.guard(() => app.show(names));
    } });
    const chip = h("span", { className: "chip" });
    chip.style.background = app.shown.includes(name) ? app.colourOf(name) : "transparent";
    const events = app.shown.includes(name) ? [] : app.elsewhere.get(name) ?? [];
    const grave = events.some(({ severity }) => severity === "critical");
    return h("label", {}, box, chip, name, events.length
      ? h("span", { className: `mark ${grave ? "critical" : "warning"}` }, `⚑ ${plural(events.length, "event")}`) : "");
  }), h("span", { className: missed ? "count alarm" : "count" }, app.names.length > 1 ? count : ""));
  if (focused !== undefined) [...app.runList.querySelectorAll("input")].find((box) => box.value === focused)?.focus();
}

/** Offer the statistics, steps and scalars of the shown runs, and keep what was chosen if it is still there. */
export function offer(app) {
  const metas = app.shown.map((name) => app.metas.get(name));
  const statistics = new Map(metas.flatMap((meta) => meta.statistics.map((one) => [one.name, one])));
  app.statisticSelect.replaceChildren(...[...statistics.values()].map((one) =>
    h("option", { value: one.name, title: one.definition }, one.label + (one.unit ? ` [${one.unit}]` : ""))));
  if (!statistics.has(app.statistic)) app.statistic = statistics.keys().next().value ?? null;
  app.statisticSelect.value = app.statistic;
  app.steps = [...new Set(metas.flatMap((meta) => meta.steps))].sort((one, other) => one - other);
  if (app.step === null || !app.steps.length) app.step = app.steps.at(-1) ?? null;
  const scalars = [...new Set(metas.flatMap((meta) => meta.scalars))];
  if (app.loss === undefined || (app.loss && !scalars.includes(app.loss))) {
    app.loss = scalars.find((tag) => /train.*loss|loss.*train/i.test(tag)) ?? scalars.find((tag) => /loss/i.test(tag)) ?? "";
  }
  app.lossSelect.replaceChildren(h("option", { value: "" }, "nothing"), ...scalars.map((tag) => h("option", { value: tag }, tag)));
  app.lossSelect.value = app.loss;
}
