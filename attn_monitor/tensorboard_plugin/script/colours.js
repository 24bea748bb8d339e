/** The colours of values: the maps of attn_monitor/colors.py on the scales of attn_monitor/scales.py. */

import { clamp } from "./helpers.js";

export const VIRIDIS = [
  [68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140],
  [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37],
];
export const BELOW = [[8, 29, 88], [34, 84, 160], [66, 120, 180]];
export const ABOVE = [[222, 105, 8], [252, 166, 54], [255, 245, 190]];

const shades = (stops) => Array.from({ length: 513 }, (_, index) => {
  const place = (index / 512) * (stops.length - 1);
  const below = Math.min(Math.floor(place), stops.length - 2);
  const mixed = stops[below].map((low, channel) => low + (stops[below + 1][channel] - low) * (place - below));
  return `rgb(${mixed.map(Math.round).join(",")})`;
});
const SHADES = { whole: shades(VIRIDIS), below: shades(BELOW), above: shades(ABOVE) };

/** Where values stand on a scale, 0 to 1, as a function; the same as `Scale.position` in attn_monitor/scales.py. */
export function positions({ kind, low, high }) {
  const stretch = kind === "log" ? Math.log : kind === "signed" ? Math.asinh : (x) => x;
  const [start, length] = [stretch(low), stretch(high) - stretch(low)];
  return (value) => (stretch(clamp(value, low, high)) - start) / length;
}

/** The colour of values as a function: the maps of attn_monitor/colors.py, with a break at the limit if there is one. */
export function colours({ scale, threshold }) {
  const position = positions(scale);
  const pick = (map, place) => map[Math.round(512 * clamp(place, 0, 1))];
  if (threshold === null) return (value) => pick(SHADES.whole, position(value));
  const limit = clamp(position(threshold), 1e-6, 1 - 1e-6);
  return (value) => (value > threshold
    ? pick(SHADES.above, (position(value) - limit) / (1 - limit)) : pick(SHADES.below, position(value) / limit));
}
