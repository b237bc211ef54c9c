// Draws a run on one time axis: its rounds, its incidents, the loss and the step time, with a read-out.

import { RANGES, courseOf, marks, readOut } from "./course.js";
import { html, mount } from "./patch.js";
import { clock, line, linear, logarithmic, nearest, powers, ticks, timeTicks, written, zone } from "./scale.js";

const LEFT = 52;
const RIGHT = 10;
const MARKS = { top: 0, height: 16 };
const ROUNDS = { top: 38, height: 46 };
const LOSS = { top: 116, height: 128 };
const PACE = { top: 276, height: 92 };
const HEIGHT = 406;
const SHAPES = {
  bad: "M-5 -4.5h10l-5 9z",
  warn: "M-5 -4.5h10l-5 9z",
  busy: "M0 -5l5 5l-5 5l-5 -5z",
  done: "M-4 -4h8v8h-8z",
  other: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
};

export class Curves {
  /** Draws into `place`, in its full width. */
  constructor(place) {
    this.place = place;
    this.room = 0;
    this.range = "all";
    this.log = false; // whether the loss is drawn on a logarithmic scale
    this.wall = null;
    new ResizeObserver(() => this.draw({ room: place.clientWidth })).observe(place);
    for (const kind of ["pointermove", "pointerdown"]) place.addEventListener(kind, (event) => this.point(event));
    place.addEventListener("pointerleave", () => {
      if (!place.contains(document.activeElement)) this.draw({ wall: null });
    });
    place.addEventListener("keydown", (event) => this.key(event));
    place.addEventListener("change", ({ target }) =>
      this.draw(target.name === "log" ? { log: target.checked } : { range: target.value, wall: null }),
    );
  }

  /** The newest lines (see course.js). */
  show(lines) {
    this.draw({ lines });
  }

  point(event) {
    const reader = event.target.closest(".reader");
    if (reader) this.go(nearest(this.course.points.wall, this.back(event.clientX - reader.getBoundingClientRect().left)));
  }

  go(place) {
    const wall = this.course.points.wall[place];
    if (wall !== undefined && wall !== this.wall) this.draw({ wall });
  }

  key(event) {
    if (!event.target.matches(".reader")) return;
    const walls = this.course.points.wall;
    const here = this.wall === null ? walls.length - 1 : nearest(walls, this.wall);
    const stops = this.course.incidents.map((each) => nearest(walls, each.wall));
    const places = {
      ArrowLeft: here - 1,
      ArrowDown: here - 1,
      ArrowRight: here + 1,
      ArrowUp: here + 1,
      Home: 0,
      End: walls.length - 1,
      PageUp: stops.findLast((stop) => stop < here) ?? 0,
      PageDown: stops.find((stop) => stop > here) ?? walls.length - 1,
    };
    if (event.key === "Escape") this.draw({ wall: null });
    if (!(event.key in places)) return;
    event.preventDefault();
    this.go(Math.min(walls.length - 1, Math.max(0, places[event.key])));
  }

  draw(turned) {
    Object.assign(this, turned);
    if (!this.lines) return;
    this.course = courseOf(this.lines, RANGES.find(([key]) => key === this.range)[2]);
    mount(
      this.place,
      html`<figure class="course">${this.course && rangesOf(this.range, this.log, this.logs())}${this.course && this.room > 0 && this.drawing()}</figure>`,
    );
  }

  /** Whether a logarithmic scale has room for all losses. */
  logs() {
    const known = this.course.points.loss.filter((value) => value !== null);
    return known.length > 0 && known.every((value) => value > 0);
  }

  drawing() {
    const { course, room, wall } = this;
    const [start, end] = [LEFT, room - RIGHT];
    const x = linear(course.from, course.to, start, end);
    this.back = linear(start, end, course.from, course.to);
    const walls = course.points.wall;
    const place = walls.length ? (wall === null ? walls.length - 1 : nearest(walls, wall)) : -1;
    const said = place < 0 ? "No point in this range" : readOut(course, place);
    const frame = { start, end, x, room };
    return html`<div
        class="reader"
        role="slider"
        tabindex="0"
        aria-label="Moment in the course of the run"
        aria-valuemin="0"
        aria-valuemax="${Math.max(0, walls.length - 1)}"
        aria-valuenow="${Math.max(0, place)}"
        aria-valuetext="${said}"
      >
        <svg class="chart" width="${room}" height="${HEIGHT}" aria-hidden="true">
          ${timeAxis(course, frame)}
          ${roundsOf(course, frame)}
          ${panel({ box: LOSS, name: "loss", walls, values: course.points.loss, frame, look: "loss", log: this.log && this.logs() })}
          ${panel({ box: PACE, ...paceOf(course.points.step_s), walls, frame, look: "pace", floor: 0 })}
          ${incidentsOf(course, frame)}
          ${wall !== null && place >= 0 && cursor(x(walls[place]))}
        </svg>
      </div>
      <figcaption>
        <span class="readout">${said}</span>
        <span class="aside keys">Arrow keys move by a point, Page Up and Page Down by an incident.</span>
        <span class="legend">
          <span class="look-bad">${markOf("bad")} failure</span>
          <span class="look-busy">${markOf("busy")} planned change</span>
        </span>
      </figcaption>`;
  }
}

function rangesOf(chosen, log, logs) {
  return html`<fieldset class="ranges">
    <legend class="unseen">Range of time</legend>
    ${logs && html`<label class="log"><input type="checkbox" name="log" ${log ? "checked" : ""} /><span>log scale</span></label>`}
    ${RANGES.map(
      ([key, name]) => html`<label>
        <input type="radio" name="range" value="${key}" ${key === chosen ? "checked" : ""} /><span>${name}</span>
      </label>`,
    )}
  </fieldset>`;
}

function paceOf(seconds) {
  const most = seconds.reduce((a, b) => (b !== null && b > a ? b : a), 0);
  const small = most > 0 && most < 1;
  return { name: small ? "step time, ms" : "step time, s", values: small ? seconds.map((s) => (s === null ? null : s * 1000)) : seconds };
}

function timeAxis(course, frame) {
  const { step, at } = timeTicks(course.from, course.to, Math.max(2, Math.floor((frame.end - frame.start) / 90)));
  const bottom = PACE.top + PACE.height;
  return html`<g class="axis">
    ${at.map((wall) => {
      const x = frame.x(wall).toFixed(1);
      return html`<line class="grid" x1="${x}" x2="${x}" y1="${ROUNDS.top}" y2="${bottom}" />
        <text x="${x}" y="${bottom + 15}" text-anchor="middle">${clock(wall, step)}</text>`;
    })}
    <text x="${frame.end}" y="${bottom + 32}" text-anchor="end" class="name">time, ${zone(course.to)}</text>
  </g>`;
}

/** Rounds as blocks whose height is the number of ranks: a gap is time without a round. */
function roundsOf(course, frame) {
  const most = Math.max(1, ...course.rounds.map((round) => round.world));
  const base = ROUNDS.top + ROUNDS.height;
  const height = linear(0, most, 0, ROUNDS.height - 4);
  return html`<g class="rounds-drawn">
    <text x="${frame.start - 8}" y="${ROUNDS.top + 11}" text-anchor="end">${most}</text>
    <text x="${frame.start - 8}" y="${base}" text-anchor="end">0</text>
    <text x="${frame.start}" y="${ROUNDS.top - 7}" class="name">rounds, height by number of ranks</text>
    <line class="base" x1="${frame.start}" x2="${frame.end}" y1="${base}" y2="${base}" />
    ${course.rounds.map((round) => {
      const left = Math.max(frame.start, frame.x(round.from));
      const width = Math.max(1, frame.x(round.to) - left - 1);
      const tall = Math.max(2, height(round.world));
      const words = width > 74 ? `round ${round.number}: ${round.world}` : width > 22 ? round.number : "";
      return html`<g>
        <rect class="${round.lasts ? "round now" : "round"}" x="${left}" y="${base - tall}" width="${width}" height="${tall}" />
        ${words && tall > 14 && html`<text class="inside" x="${left + 5}" y="${base - 5}">${words}</text>`}
      </g>`;
    })}
  </g>`;
}

function panel({ box, name, walls, values, frame, look, floor = null, log = false }) {
  const known = values.filter((value) => value !== null);
  const [low, high] = log ? [Math.min(...known), Math.max(...known)] : known.length ? bounds(known, floor) : [0, 1];
  const bottom = box.top + box.height;
  const y = (log ? logarithmic : linear)(low, high, bottom, box.top + 4);
  const tens = log ? powers(low, high, box.height / 34) : [];
  const marked = tens.length > 1 ? tens : known.length ? ticks(low, high, box.height / 34) : [];
  const step = marked.length > 1 ? marked[1] - marked[0] : Math.abs(marked[0] ?? 1) || 1;
  const last = known.at(-1);
  const xs = walls.map(frame.x);
  return html`<g class="panel">
    <text x="${frame.start}" y="${box.top - 7}" class="name">${name}</text>
    ${known.length > 0 && html`<text x="${frame.end}" y="${box.top - 7}" text-anchor="end" class="name">last ${written(last, Math.abs(last) / 100 || 1)}</text>`}
    ${marked.map((value) => {
      const at = y(value).toFixed(1);
      return html`<line class="grid" x1="${frame.start}" x2="${frame.end}" y1="${at}" y2="${at}" />
        <text x="${frame.start - 8}" y="${Number(at) + 4}" text-anchor="end">${written(value, tens.length > 1 ? value : step)}</text>`;
    })}
    <line class="base" x1="${frame.start}" x2="${frame.end}" y1="${bottom}" y2="${bottom}" />
    ${known.length
      ? html`<path class="curve ${look}" d="${line(xs, values.map((value) => (value === null ? null : y(value))))}" />`
      : html`<text x="${(frame.start + frame.end) / 2}" y="${box.top + box.height / 2}" text-anchor="middle">nothing known yet</text>`}
  </g>`;
}

function bounds(known, floor) {
  const low = floor ?? known.reduce((a, b) => Math.min(a, b));
  const high = known.reduce((a, b) => Math.max(a, b));
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [floor ?? low - room, high + room];
}

function incidentsOf(course, frame) {
  const bottom = PACE.top + PACE.height;
  return html`<g class="marks">
    ${course.incidents
      .filter((each) => each.took > 0)
      .map((each) => {
        const left = frame.x(each.wall);
        const width = Math.max(1, Math.min(frame.end, frame.x(each.wall + each.took)) - left);
        return html`<rect class="took look-${each.look}" x="${left}" y="${LOSS.top}" width="${width}" height="${bottom - LOSS.top}" />`;
      })}
    ${marks(course.incidents, frame.x).map((mark) => {
      const middle = MARKS.top + MARKS.height / 2;
      return html`<g class="mark look-${mark.look}">
        <title>${mark.words.join("\n")}</title>
        <line x1="${mark.x}" x2="${mark.x}" y1="${middle}" y2="${bottom}" />
        <path d="${SHAPES[mark.look] ?? SHAPES.other}" transform="translate(${mark.x} ${middle})" />
        ${mark.many > 1 && html`<text x="${mark.x + 8}" y="${middle + 4}">${mark.many}</text>`}
      </g>`;
    })}
  </g>`;
}

function cursor(at) {
  return html`<line class="cursor" x1="${at}" x2="${at}" y1="${ROUNDS.top}" y2="${PACE.top + PACE.height}" />`;
}

function markOf(look) {
  return html`<svg class="icon" viewBox="-6 -6 12 12" aria-hidden="true"><path d="${SHAPES[look]}" fill="currentColor" /></svg>`;
}
