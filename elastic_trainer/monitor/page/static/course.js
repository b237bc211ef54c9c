// What the drawing of a run's course shows, before it is drawn: points, rounds and incidents within a range. Pure.

import { spans, whatOf } from "./history.js";
import { count, duration, list, measure, number, plural, text } from "./words.js";

export const RANGES = [
  ["all", "All", Infinity],
  ["hour", "1 h", 3600],
  ["minutes", "10 min", 600],
];

/** {from, to, points: {wall, step, loss, step_s, world_size}, rounds, incidents}; null if there is nothing to draw. */
export function courseOf(snapshot, now, range) {
  const curves = snapshot.curves ?? {};
  const walls = list(curves.wall).map(number);
  const rounds = spans(snapshot).filter((span) => number(span.first.wall) !== null);
  const known = [...walls, ...rounds.map((span) => span.first.wall)].filter((wall) => wall !== null);
  if (!known.length) return null;
  const [earliest, latest] = [least(known), Math.max(now, walls.at(-1) ?? now)];
  const ended = ["succeeded", "failed"].includes(snapshot.state);
  const to = ended ? endOf(walls, rounds, latest) : latest;
  const from = Math.min(to - 1, Math.max(earliest, to - range));
  return {
    from,
    to,
    points: pointsOf(curves, walls, from, to),
    rounds: rounds.map((span) => roundOf(span, to)).filter((round) => round.to >= from && round.from <= to),
    incidents: incidentsOf(snapshot, from, to),
  };
}

function endOf(walls, rounds, latest) {
  const ends = [walls.at(-1), rounds.at(-1)?.end, rounds.at(-1)?.first.wall].map(number).filter((end) => end !== null);
  return ends.length ? Math.max(...ends) : latest;
}

function pointsOf(curves, walls, from, to) {
  const places = walls.map((_, place) => place).filter((place) => walls[place] >= from && walls[place] <= to);
  const column = (name) => places.map((place) => number(list(curves[name])[place]));
  return {
    wall: places.map((place) => walls[place]),
    step: column("step"),
    loss: column("loss"),
    step_s: column("step_s"),
    world_size: column("world_size"),
  };
}

function roundOf(span, to) {
  const from = span.first.wall;
  return {
    number: count(span.first.number),
    from,
    to: Math.max(from, span.lasts ? to : (span.end ?? from)),
    world: number(span.first.world_size) ?? 0,
    lasts: span.lasts,
  };
}

function incidentsOf(snapshot, from, to) {
  return list(snapshot.incidents)
    .filter((each) => number(each.wall) !== null && each.wall >= from && each.wall <= to)
    .map((each) => {
      const took = number(each.total_s) ?? 0;
      const { label, look } = whatOf(each);
      const time = took ? `, ${duration(took)}` : "";
      const reason = text(each.reason) && `: ${text(each.reason)}`;
      return { wall: each.wall, took, look, words: `${label}${time}${reason}` };
    })
    .reverse();
}

const least = (values) => values.reduce((a, b) => (b < a ? b : a), Infinity);

/** Marks that would lie on each other become one: {x, look, words}. */
export function marks(incidents, x, room = 9) {
  const worst = ["bad", "warn", "busy", "done", "other"];
  const found = [];
  for (const each of incidents) {
    const at = x(each.wall);
    const last = found.at(-1);
    if (last && at - last.x < room) {
      last.many += 1;
      last.words.push(each.words);
      if (worst.indexOf(each.look) < worst.indexOf(last.look)) last.look = each.look;
    } else {
      found.push({ x: at, wall: each.wall, look: each.look, many: 1, words: [each.words] });
    }
  }
  return found;
}

/** The read-out for one point, and the incidents between it and its neighbors. */
export function readOut(course, place) {
  const { wall, step, loss, step_s: pace, world_size: world } = course.points;
  const [before, after] = [wall[place - 1] ?? -Infinity, wall[place + 1] ?? Infinity];
  const [low, high] = [(before + wall[place]) / 2, (wall[place] + after) / 2];
  const near = course.incidents.filter((each) => each.wall >= low && each.wall < high).map((each) => each.words);
  const when = new Date(wall[place] * 1000).toLocaleTimeString([], { hour12: false });
  const ranks = world[place] === null ? "" : plural(world[place], "rank");
  const parts = [when, `step ${count(step[place])}`, `loss ${measure(loss[place])}`, `step time ${duration(pace[place])}`];
  return [...parts, ranks, ...near].filter(Boolean).join(" · ");
}
