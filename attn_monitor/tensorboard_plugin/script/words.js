/** Numbers, names and findings in words. */

export const BROKEN = "nan or inf logits";

export function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  return short(value, 4);
}

/** A number in so many digits, without zeros at their end, and with an exponent rather than many zeros: 1e-4. */
export function short(value, digits) {
  const rounded = Number(value.toPrecision(digits));
  return rounded !== 0 && (Math.abs(rounded) < 1e-3 || Math.abs(rounded) >= 1e5) ? rounded.toExponential() : String(rounded);
}

export const times = (value) => `×${short(10 ** value, 3)}`;
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Part the names of layers into what they share and what tells them apart: "layers.", ["0", "1"], ".attn". */
export function parted(names) {
  const parts = names.map((name) => name.split("."));
  const most = names.length > 1 ? Math.min(...parts.map((one) => one.length)) - 1 : 0; // something has to be left
  const shared = (at, limit) => {
    let count = 0;
    while (count < limit && parts.every((one) => one.at(at(count)) === parts[0].at(at(count)))) count += 1;
    return count;
  };
  const before = shared((count) => count, most);
  const after = shared((count) => -1 - count, most - before);
  return {
    before: parts[0]?.slice(0, before).map((part) => `${part}.`).join("") ?? "",
    own: parts.map((one) => one.slice(before, one.length - after).join(".")),
    after: after ? parts[0].slice(-after).map((part) => `.${part}`).join("") : "",
  };
}

export const endOf = (line) => line?.values.findLast((value) => value !== null) ?? null;
export const unusual = (scale) => scale !== null && scale !== undefined && (scale < 0.8 || scale > 1.2);

export const scaleWords = (scale) => `scale·√d_k is ${short(scale, 3)}, textbook 1: ` +
  (scale > 1 ? "the logits are that many times larger than with the usual 1/√d_k."
    : "the logits are smaller by that factor than with the usual 1/√d_k.");
