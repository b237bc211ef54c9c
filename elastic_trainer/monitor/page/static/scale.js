// Axes: the positions of values, the ticks, and their labels. Pure.

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

export function linear(from, to, start, end) {
  const factor = to > from ? (end - start) / (to - from) : 0;
  return (value) => start + (value - from) * factor;
}

/** The same for values above 0, each factor of ten as long as the next. */
export function logarithmic(from, to, start, end) {
  const scale = linear(Math.log10(from), Math.log10(to), start, end);
  return (value) => scale(Math.log10(value));
}

/** Powers of ten within the bounds, at most `many`. */
export function powers(from, to, many) {
  const [low, high] = [Math.ceil(Math.log10(from) - 1e-9), Math.floor(Math.log10(to) + 1e-9)];
  const apart = Math.max(1, Math.ceil((high - low + 1) / many));
  const found = [];
  for (let power = low; power <= high; power += apart) found.push(10 ** power);
  return found;
}

/** About `many` round values within the bounds. */
export function ticks(from, to, many) {
  const span = to - from;
  if (!(span > 0)) return [from];
  const rough = span / many;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((each) => each * power >= rough) ?? 10);
  const found = [];
  for (let place = Math.ceil(from / step - 1e-9); place * step <= to + step * 1e-9; place += 1) found.push(place * step);
  return found;
}

/** Times at full minutes, hours and so on of local time. */
export function timeTicks(from, to, many) {
  const rough = (to - from) / many;
  const step = TIME_STEPS.find((each) => each >= rough) ?? Math.ceil(rough / 604800) * 604800;
  const shift = new Date(to * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) found.push(at);
  return { step, at: found };
}

export function clock(wall, step) {
  const when = new Date(wall * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const time = `${two(when.getHours())}:${two(when.getMinutes())}`;
  if (step < 60) return `${time}:${two(when.getSeconds())}`;
  const midnight = when.getHours() === 0 && when.getMinutes() === 0;
  if (step >= 86400 || midnight) return `${two(when.getMonth() + 1)}-${two(when.getDate())}`;
  return time;
}

/** The zone of this browser: `UTC+1`. */
export function zone(wall) {
  const minutes = -new Date(wall * 1000).getTimezoneOffset();
  if (minutes === 0) return "UTC";
  const hours = Math.floor(Math.abs(minutes) / 60);
  const rest = Math.abs(minutes) % 60;
  return `UTC${minutes < 0 ? "−" : "+"}${hours}${rest ? `:${String(rest).padStart(2, "0")}` : ""}`;
}

/** A tick's label with the digits that its step needs. */
export function written(value, step) {
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(1).replace(".0e", "e");
  const digits = step >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(step) - 1e-9));
  return value.toFixed(digits);
}

/** The line through the known points; it breaks where one is missing. */
export function line(xs, ys) {
  let path = "";
  let on = false;
  for (let place = 0; place < xs.length; place += 1) {
    if (ys[place] === null) {
      on = false;
    } else {
      path += `${on ? "L" : "M"}${xs[place].toFixed(1)} ${ys[place].toFixed(1)}`;
      on = true;
    }
  }
  return path;
}

/** The index in the ascending `values` that is nearest to `value`. */
export function nearest(values, value) {
  let [low, high] = [0, values.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle;
    else high = middle;
  }
  return high < 0 || value - values[low] <= values[high] - value ? low : high;
}
