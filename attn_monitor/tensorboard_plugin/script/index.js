/**
 * The Attention view: a heat map of layers x heads over time, and what became of one head.
 *
 * `render()` is what TensorBoard's iframe calls. `mount(element, source)` shows the same from any source; what that is,
 * sources.js says. uPlot is expected as a global. Names come from users: they only ever become text nodes.
 *
 * The files here are joined into one script, so names at the top of two of them must differ: see page.py.
 */

import { h } from "./helpers.js";
import { httpSource } from "./sources.js";
import { App } from "./app.js";

/**
 * Show the view in an element. Returns what scripts can read: `state()`, `cells(run)`, and `app`.
 *
 * The element gets the same as its property `attention`.
 */
export function mount(element, source) {
  const app = new App(element, source);
  const handle = {
    app,
    cells: (run) => app.maps.get(run).cells(),
    state: () => ({
      runs: app.shown, statistic: app.statistic, step: app.step, steps: app.steps, selected: app.selected, playing: app.playing,
      painted: [...app.maps.values()].map(({ frame }) => frame && { statistic: frame.statistic, step: frame.step }),
      events: app.events.length, charts: app.plots.map(({ name }) => name), drawn: app.charts.dataset.ready === "true",
    }),
    ready: app.start(),
  };
  element.attention = handle;
  return handle;
}

/** Follow TensorBoard's own light or dark, which is a class of the page around the iframe. */
function followTheme(element, repaint) {
  let outer;
  try {
    outer = window.parent !== window ? window.parent.document.body : null;
  } catch {
    return; // framed by another site
  }
  if (!outer) return;
  const apply = () => {
    element.dataset.theme = outer.classList.contains("dark-mode") ? "dark" : "light";
    repaint();
  };
  new MutationObserver(apply).observe(outer, { attributes: true, attributeFilter: ["class"] });
  apply();
}

/** Called by TensorBoard in the plugin's iframe. */
export async function render() {
  const here = (name) => new URL(name, import.meta.url).href;
  const loaded = (element) => new Promise((resolve, reject) => {
    element.addEventListener("load", resolve);
    element.addEventListener("error", () => reject(new Error(`${element.href || element.src} did not load`)));
    document.head.append(element);
  });
  const styles = ["uPlot.min.css", "index.css"].map((name) => loaded(h("link", { rel: "stylesheet", href: here(name) })));
  const library = loaded(h("script", { src: here("uPlot.iife.min.js") }));
  await Promise.all([...styles, library]);
  document.title = "Attention";
  const handle = mount(document.body, httpSource(import.meta.url));
  followTheme(document.body, () => handle.app.repaint());
  await handle.ready;
}
