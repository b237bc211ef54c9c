// Rounds and incidents of a snapshot as rows: the same as history.py, and a test compares the two.

import { NONE, count, duration, fixed, list, listed, named, number, plural, stamp, text } from "./words.js";

const SHOWN = 100;
const OVER = new Set(["broken", "closed"]);
const PARTS = ["detect", "regroup", "resume"];

export function moment(wall) {
  const [iso, people] = stamp(wall);
  return { wall: number(wall), iso, people };
}

export function incidents(snapshot) {
  return list(snapshot.incidents).slice(0, SHOWN).map(incident);
}

export function whatOf(each) {
  return each.cause ? named("causes", each.cause) : named("kinds", each.kind || "round");
}

function incident(each) {
  const ended = ["", "round"].includes(text(each.kind));
  const what = whatOf(each);
  const lost = number(each.steps_lost);
  return {
    when: moment(each.wall),
    what: what.label,
    look: what.look,
    who: who(each),
    rounds: ended ? change(each.round, each.next_round) : count(each.round),
    world: ended ? change(each.world_before, each.world_after) : NONE,
    lost: ended ? count(lost) : NONE,
    total: ended ? duration(each.total_s) : NONE,
    parts: ended ? parts(each) : [],
    reason: text(each.reason),
    sentence: ended ? sentence(each, lost) : "",
  };
}

function who(each) {
  const ranks = list(each.ranks).map(count);
  const named = ranks.length ? `${ranks.length === 1 ? "rank" : "ranks"} ${listed(ranks, 8)}` : "";
  return [listed(list(each.nodes).map(text)), named].filter(Boolean).join(", ") || NONE;
}

function change(before, after) {
  return after == null || before === after ? count(before) : `${count(before)} → ${count(after)}`;
}

function parts(each) {
  const seconds = PARTS.map((name) => Math.max(0, number(each[`${name}_s`]) ?? 0));
  const total = seconds.reduce((a, b) => a + b, 0);
  let x = 0;
  return PARTS.map((name, place) => {
    const share = total ? seconds[place] / total : 0;
    const part = {
      name,
      time: duration(each[`${name}_s`]),
      x: `${fixed(x * 100, 2)}%`,
      width: `${fixed(share * 100, 2)}%`,
    };
    x += share;
    return part;
  });
}

function sentence(each, lost) {
  const said = lost === 0 ? "Nothing was lost." : lost === null ? "" : `${plural(lost, "step was", "steps were")} lost.`;
  const total = number(each.total_s);
  return [said, total ? `Training again after ${duration(total)}.` : ""].filter(Boolean).join(" ");
}

export function rounds(snapshot, now) {
  return spans(snapshot).map((span) => round(span, now)).reverse().slice(0, SHOWN);
}

/** The journal has a line for each transition, a round several: these are the rounds, the oldest first. */
export function spans(snapshot) {
  const found = [];
  for (const entry of list(snapshot.rounds)) {
    const wall = number(entry.wall);
    const last = found.at(-1);
    if (last && last.first.number === entry.number) {
      last.last = entry;
    } else {
      if (last && last.end === null) last.end = wall;
      found.push({ first: entry, last: entry, end: null });
    }
    if (OVER.has(entry.state)) found.at(-1).end = wall;
  }
  for (const span of found) span.lasts = span.end === null && !OVER.has(span.last.state);
  return found;
}

function stateOf(span) {
  const told = named("rounds", span.last.state);
  return span.end !== null && ["active", "draining"].includes(told.key) ? named("rounds", "replaced") : told;
}

function round(span, now) {
  const began = number(span.first.wall);
  const until = span.lasts ? now : span.end;
  const known = began !== null && until !== null && (span.lasts || span.first !== span.last || until > began);
  const members = list(span.first.nodes);
  return {
    number: count(span.first.number),
    state: stateOf(span),
    when: moment(began),
    lasted: known ? duration(until - began) : NONE,
    world: count(span.first.world_size),
    nodes: members.length ? count(members.length) : NONE,
    reason: text(span.first.reason),
    ended: span.last === span.first ? "" : text(span.last.reason),
  };
}
