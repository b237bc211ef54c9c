// The data of a run's drawing: points, rounds and incidents within a range. Pure.

import { written } from "./scale.js";

export const RANGES = [
  ["all", "All", Infinity],
  ["hour", "1 h", 3600],
  ["minutes", "10 min", 600],
];

/**
 * {from, to, points: {wall, step, loss, step_s, world_size}, rounds, incidents}; null if there is nothing to draw.
 * `lines` are those of view.py: the time and whether the run has ended, its rounds, its incidents, then the points.
 */
export function courseOf([{ now, ended }, spans, incidents, ...points], range) {
  const rounds = spans.map(([number, from, end, world, lasts]) => ({ number, from, end, world, lasts }));
  const known = [...points.slice(0, 1).map(([wall]) => wall), ...rounds.map((round) => round.from)];
  if (!known.length) return null;
  const last = points.at(-1)?.[0];
  const to = ended ? endOf(last, rounds.at(-1), now) : Math.max(now, last ?? now);
  const from = Math.min(to - 1, Math.max(Math.min(...known), to - range));
  const within = points.filter(([wall]) => wall >= from && wall <= to);
  const column = (place) => within.map((point) => point[place]);
  return {
    from,
    to,
    points: { wall: column(0), step: column(1), loss: column(2), step_s: column(3), world_size: column(4) },
    rounds: rounds
      .map((round) => ({ ...round, to: Math.max(round.from, round.lasts ? to : (round.end ?? round.from)) }))
      .filter((round) => round.to >= from && round.from <= to),
    incidents: incidents.filter(({ wall }) => wall >= from && wall <= to),
  };
}

function endOf(last, round, now) {
  const ends = [last, round?.end, round?.from].filter((end) => end != null);
  return ends.length ? Math.max(...ends) : now;
}

/** Merges marks that would overlap: {x, look, words}. */
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

/** The read-out of one point, with the incidents between it and its neighbors. */
export function readOut(course, place) {
  const { wall, step, loss, step_s: pace, world_size: world } = course.points;
  const [before, after] = [wall[place - 1] ?? -Infinity, wall[place + 1] ?? Infinity];
  const [low, high] = [(before + wall[place]) / 2, (wall[place] + after) / 2];
  const near = course.incidents.filter((each) => each.wall >= low && each.wall < high).map((each) => each.words);
  const when = new Date(wall[place] * 1000).toLocaleTimeString([], { hour12: false });
  const parts = [
    when,
    step[place] === null ? "" : `step ${step[place].toLocaleString("en")}`,
    loss[place] === null ? "" : `loss ${written(loss[place], Math.abs(loss[place]) / 1000)}`,
    pace[place] === null ? "" : `step time ${timed(pace[place])}`,
    world[place] === null ? "" : `${world[place]} ${world[place] === 1 ? "rank" : "ranks"}`,
  ];
  return [...parts, ...near].filter(Boolean).join(" · ");
}

const timed = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(1)} s`);
