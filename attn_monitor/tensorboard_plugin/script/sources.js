/**
 * Where the view asks: TensorBoard's routes, or data that is embedded in a page. Both have
 *
 *   runs()                                -> [name, ...]
 *   meta(run)                             -> {name, layers, heads, head_dims, steps, statistics, scalars, events, notes}
 *   frames(run, statistic, first, count)  -> {steps, shape: [S, L, H], data: base64 of little-endian float32}
 *   line(run, layer, head, statistics)    -> {statistics: {name: {steps, values}}}, null where there is no value
 *   events(run)                           -> [{step, layer, head, severity, state, message, ...}, ...]
 *   scalar(run, tag)                      -> {steps, values}
 *
 * all as promises, and `fixed: true` where nothing can be added later.
 */

/** Ask TensorBoard's routes, which lie beside this module. */
export function httpSource(base) {
  const get = async (route, query = {}) => {
    const url = new URL(route, base);
    for (const [name, value] of Object.entries(query)) {
      for (const one of [value].flat()) url.searchParams.append(name, one);
    }
    const response = await fetch(url);
    const body = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
    if (!response.ok) throw new Error(body.error);
    return body;
  };
  return {
    runs: () => get("runs"),
    meta: (run) => get("meta", { run }),
    frames: (run, statistic, first, count) => get("frames", { run, statistic, first, count }),
    line: (run, layer, head, statistics) => get("line", { run, layer, head, statistic: statistics }),
    events: (run) => get("events", { run }),
    scalar: (run, tag) => get("scalar", { run, tag }),
  };
}

/** Serve what is embedded in a page: {version, runs: [{meta, tables, scalars, events}]}. */
export function inlineSource(data) {
  if (data.version !== 1) throw new Error(`expected data of version 1, got ${data.version}`);
  const runs = new Map(data.runs.map((run) => [run.meta.name, run]));
  const decoded = new Map();
  const table = (run, statistic) => {
    const stored = runs.get(run).tables[statistic];
    if (!decoded.has(stored)) {
      const places = new Map(stored.steps.map((step, index) => [step, index]));
      decoded.set(stored, { ...stored, places, values: decode(stored.data) });
    }
    return decoded.get(stored);
  };
  return {
    fixed: true,
    runs: async () => [...runs.keys()],
    meta: async (run) => runs.get(run).meta,
    frames: async (run, statistic, first, count) => {
      const { shape, places, values } = table(run, statistic);
      const size = shape[1] * shape[2];
      const steps = runs.get(run).meta.steps.slice(first, first + count);
      const chosen = new Float32Array(steps.length * size).fill(NaN);
      steps.forEach((step, index) => {
        const place = places.get(step);
        if (place !== undefined) chosen.set(values.subarray(place * size, (place + 1) * size), index * size);
      });
      return { steps, shape: [steps.length, shape[1], shape[2]], values: chosen };
    },
    line: async (run, layer, head, statistics) => {
      const lines = {};
      for (const name of statistics) {
        const { steps, shape, values } = table(run, name);
        const at = (index) => values[(index * shape[1] + layer) * shape[2] + head];
        const inside = layer < shape[1] && head < shape[2];
        lines[name] = { steps, values: steps.map((_, index) => (inside && isFinite(at(index)) ? at(index) : null)) };
      }
      return { statistics: lines };
    },
    events: async (run) => runs.get(run).events,
    scalar: async (run, tag) => runs.get(run).scalars[tag],
  };
}

export function decode(data) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  return new Float32Array(bytes.buffer);
}
