// What the page of one run says, from its snapshot: the same as view.py, and a test compares the two.

import { moment } from "./history.js";
import { median, standingStill, unheard } from "./nodes.js";
import {
  NAMES,
  NONE,
  ago,
  count,
  duration,
  fixed,
  list,
  listed,
  measure,
  named,
  number,
  percent,
  plural,
  size,
  text,
} from "./words.js";

const ENDED = ["succeeded", "failed"];
const OVERDUE = 2;
const ORDER = { bad: 0, warn: 1, busy: 2 };

const figure = (name, value, note = "") => ({ name, value, note });
const note = (look, words) => ({ look, words });
const within = (snapshot) => list(snapshot.nodes).filter((node) => node.in_round).length;
const sum = (values) => values.reduce((a, b) => a + b, 0);

export function headline(snapshot) {
  const size = number(snapshot.world_size);
  const [least, most] = [number(snapshot.min_nodes), number(snapshot.max_nodes)];
  const allowed = least !== null && most !== null ? `, ${count(least)} to ${count(most)} nodes allowed` : "";
  if (!size) return `No round at present${allowed}.`;
  const where = number(snapshot.round) === null ? "" : `Round ${count(snapshot.round)}: `;
  return `${where}${plural(size, "rank")} on ${plural(within(snapshot), "node")}${allowed}.`;
}

export function since(snapshot, now) {
  if (number(snapshot.state_s) !== null) return snapshot.state_s;
  const wall = number(list(snapshot.rounds).at(-1)?.wall);
  return wall === null ? null : Math.max(0, now - wall);
}

export const ended = (snapshot) => ENDED.includes(snapshot.state);

export function figures(snapshot) {
  const samples = number(snapshot.samples);
  return [
    figure("Step", count(snapshot.step)),
    figure("Loss", measure(snapshot.loss)),
    figure("Step time", duration(pace(snapshot))),
    figure("Samples per second", count(snapshot.samples_per_s), samples === null ? "" : `${count(samples)} in all`),
    figure("Ranks", count(snapshot.world_size), snapshot.world_size ? `on ${plural(within(snapshot), "node")}` : ""),
    figure("Goodput", percent(snapshot.goodput), "time in new steps"),
    checkpointFigure(snapshot.checkpoint),
    lostFigure(list(snapshot.incidents)),
  ];
}

function pace(snapshot) {
  const there = list(snapshot.nodes).filter((node) => node.state !== "gone");
  const ofRanks = there.flatMap((node) => list(node.ranks).map((rank) => number(rank.step_s)).filter(Boolean));
  return number(snapshot.step_s) || median(ofRanks);
}

function checkpointFigure(saved) {
  if (!saved || number(saved.step) === null) return figure("Checkpoint", NONE, "none saved");
  return figure("Checkpoint", `step ${count(saved.step)}`, ago(saved.age_s));
}

function lostFigure(incidents) {
  const lost = incidents.map((each) => number(each.steps_lost)).filter(Boolean);
  const told = lost.length ? `in ${plural(lost.length, "incident")}` : `${plural(incidents.length, "incident")} known`;
  return figure("Steps lost", count(sum(lost)), told);
}

export function attention(snapshot) {
  if (ended(snapshot)) return [];
  const every = list(snapshot.nodes);
  const found = [...missing(snapshot, every), ...slow(every), ...late(snapshot.checkpoint ?? {})];
  found.push(...unreadable(snapshot), ...aside(every));
  return found.sort((a, b) => ORDER[a.look] - ORDER[b.look]);
}

export function worst(look, attention) {
  const first = attention.length ? attention[0].look : look;
  return first === "bad" || (first === "warn" && look !== "bad") ? first : look;
}

export const goodput = (snapshot) => (number(snapshot.goodput) === null ? "" : percent(snapshot.goodput));

function missing(snapshot, every) {
  const found = [];
  const there = every.filter((node) => node.state !== "gone" && node.state !== "done").length;
  const least = number(snapshot.min_nodes);
  if (least !== null && there < least) {
    found.push(note("bad", `${plural(there, "node is", "nodes are")} there, ${count(least)} are needed to train.`));
  }
  const gone = every.filter((node) => node.state === "gone");
  if (gone.length) {
    const look = gone.some((node) => node.in_round) ? "bad" : "warn";
    found.push(note(look, `${plural(gone.length, "node is", "nodes are")} gone: ${listed(heard(gone))}.`));
  }
  const silent = every.filter(unheard);
  if (silent.length) {
    found.push(note("warn", `${plural(silent.length, "node tells", "nodes tell")} nothing: ${listed(heard(silent))}.`));
  }
  return found;
}

function heard(nodes) {
  return nodes.map((node) => `${text(node.node)} (heard ${ago(node.age_s)})`);
}

function slow(every) {
  const there = every.filter((node) => node.state !== "gone");
  const ranks = there.flatMap((node) => list(node.ranks).map((rank) => ({ node: text(node.node), rank })));
  const still = ranks.filter(({ rank }) => standingStill(rank));
  const slow = ranks.filter(({ rank }) => rank.straggler && !standingStill(rank));
  const found = [];
  if (still.length) {
    const told = still.map((r) => `rank ${count(r.rank.rank)} on ${r.node} (for ${duration(r.rank.still_s)})`);
    found.push(note("bad", `${plural(still.length, "rank stands", "ranks stand")} still: ${listed(told)}.`));
  }
  if (slow.length) {
    const told = slow.map((r) => `rank ${count(r.rank.rank)} on ${r.node}${ratio(r.rank)}`);
    found.push(note("warn", `${plural(slow.length, "rank is", "ranks are")} slow: ${listed(told)}.`));
  }
  return found;
}

function ratio(rank) {
  return number(rank.slowdown) === null ? "" : ` (${fixed(rank.slowdown, 1)} times as long)`;
}

function late(saved) {
  const [age, every, failed] = [number(saved.age_s), number(saved.interval_s), number(saved.failed)];
  const found = [];
  if (age !== null && every && age > OVERDUE * every) {
    found.push(note("warn", `The last checkpoint is ${duration(age)} old; one is due every ${duration(every)}.`));
  }
  if (failed) found.push(note("warn", `${plural(failed, "save has", "saves have")} failed.`));
  return found;
}

function unreadable(snapshot) {
  const keys = list(snapshot.unreadable).map(text);
  if (!keys.length) return [];
  return [note("warn", `${plural(keys.length, "document is", "documents are")} of another version: ${listed(keys)}.`)];
}

function aside(every) {
  const names = (test) => every.filter(test).map((node) => text(node.node));
  const found = [];
  const tell = (of, what) => of.length && found.push(note("busy", `${listed(of)} ${of.length === 1 ? "is" : "are"} ${what}.`));
  for (const state of ["warming", "draining", "finishing"]) {
    tell(names((node) => node.state === state), NAMES.nodes[state].label);
  }
  tell(names((node) => node.state === "ready" && !node.in_round), "ready and not in the round");
  return found;
}

export function slices(snapshot) {
  const seconds = Object.entries(snapshot.seconds ?? {}).filter(([, value]) => number(value) !== null && value > 0);
  const total = sum(seconds.map(([, value]) => value));
  const order = Object.keys(NAMES.phases);
  const place = ([name]) => (order.includes(name) ? order.indexOf(name) : order.length);
  let x = 0;
  return seconds
    .sort((a, b) => place(a) - place(b))
    .map(([name, value]) => {
      const share = value / total;
      const phase = named("phases", name);
      const slice = {
        phase: phase.key,
        name: phase.label,
        time: duration(value),
        share: percent(share),
        x: `${fixed(x * 100, 3)}%`,
        width: `${fixed(share * 100, 3)}%`,
      };
      x += share;
      return slice;
    });
}

export function checkpoint(saved) {
  if (!saved) return [];
  const every = number(saved.interval_s);
  return [
    figure("Last", `step ${count(saved.step)}`, ago(saved.age_s)),
    figure("Size", size(saved.bytes)),
    figure("Took", duration(saved.duration_s)),
    figure("Due every", every ? duration(every) : "not by time"),
    figure("Saved", count(saved.saved)),
    figure("Failed", count(saved.failed)),
  ];
}

export function samples(snapshot, most = 12) {
  const curves = snapshot.curves ?? {};
  const walls = list(curves.wall);
  const last = walls.length - 1;
  const places = last < most ? walls.map((_, place) => place) : [];
  for (let place = 0; last >= most && place < most; place += 1) places.push(Math.floor((last * place) / (most - 1)));
  return places.reverse().map((place) => [
    moment(walls[place]),
    count(list(curves.step)[place]),
    measure(list(curves.loss)[place]),
    duration(list(curves.step_s)[place]),
    count(list(curves.world_size)[place]),
  ]);
}
