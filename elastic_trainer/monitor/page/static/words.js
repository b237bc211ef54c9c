// How the page writes numbers, durations and names: the same as words.py, and a test compares the two.

export const NONE = "–";
export const NAMES = await (await fetch(new URL("names.json", import.meta.url))).json();

export const number = (value) => (Number.isFinite(value) ? value : null);
export const text = (value) => (value == null ? "" : String(value));
export const list = (value) => (Array.isArray(value) ? value : []);
export const fixed = (value, digits) => value.toFixed(digits);
export const whole = (value) => Math.floor(value + 0.5);

export function count(value) {
  const known = number(value);
  return known === null ? NONE : String(whole(known)).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function plural(value, one, many = "") {
  return `${count(value)} ${value === 1 ? one : many || `${one}s`}`;
}

export function duration(value) {
  if (number(value) === null) return NONE;
  const seconds = Math.max(0, value);
  if (seconds < 0.9995) return milliseconds(seconds * 1000);
  if (seconds < 59.5) return `${fixed(seconds, seconds < 9.95 ? 1 : 0)} s`;
  const total = whole(seconds);
  if (total < 3600) return pair(Math.floor(total / 60), "min", total < 600 ? total % 60 : 0, "s");
  if (total < 86400) return pair(Math.floor(total / 3600), "h", Math.floor((total % 3600) / 60), "min");
  return pair(Math.floor(total / 86400), "d", Math.floor((total % 86400) / 3600), "h");
}

function milliseconds(value) {
  return value < 0.05 ? "0 s" : `${fixed(value, value < 9.95 ? 1 : 0)} ms`;
}

function pair(large, unit, small, smaller) {
  return small ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`;
}

export function lasting(value) {
  return number(value) === null || value >= 59.5 ? duration(value) : `${whole(Math.max(0, value))} s`;
}

export function ago(value) {
  return number(value) === null ? NONE : `${lasting(value)} ago`;
}

export function measure(value) {
  const known = number(value);
  if (known === null) return NONE;
  const size = Math.abs(known);
  if (size >= 100000 || (size && size < 0.0001)) return known.toExponential(2);
  return fixed(known, size >= 100 ? 1 : size >= 1 ? 3 : 4);
}

export function percent(value) {
  return number(value) === null ? NONE : `${fixed(value * 100, 1)} %`;
}

export function times(value) {
  return number(value) === null ? NONE : `${fixed(value, value < 10 ? 2 : 0)}×`;
}

export function size(value) {
  let known = number(value);
  if (known === null) return NONE;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (known < 999.5) return `${fixed(known, unit === "B" || known >= 99.5 ? 0 : 1)} ${unit}`;
    known /= 1000;
  }
  return `${fixed(known, 1)} TB`;
}

export function listed(names, most = 4) {
  const shown = names.slice(0, most).join(", ");
  return names.length > most ? `${shown} and ${names.length - most} more` : shown;
}

export function named(kind, value) {
  const key = text(value);
  if (!Object.hasOwn(NAMES[kind], key)) {
    return { key: "other", label: key.replaceAll("_", " ") || "not known", look: "other", mark: "?" };
  }
  return { key, ...NAMES[kind][key] };
}

export function natural(name) {
  return name.replace(/[0-9]+/g, (digits) => digits.padStart(12, "0"));
}

export function stamp(wall) {
  const when = number(wall) === null ? null : new Date(Math.floor(wall) * 1000);
  if (when === null || Number.isNaN(when.getTime())) return ["", ""];
  const iso = `${when.toISOString().slice(0, 19)}Z`;
  const people = iso.replace("T", " ").replace("Z", " UTC");
  return [iso, when.getTimezoneOffset() === 0 ? people : `${people} (${when.toLocaleTimeString()} here)`];
}
