// The nodes and ranks of a snapshot as rows: the same as nodes.py, and a test compares the two.

import { NONE, ago, count, duration, lasting, list, listed, named, natural, number, plural, text, times } from "./words.js";

const AT_WORK = new Set(["training", "repeated", "data"]);
const STILL_S = 30;
const STILL_STEPS = 10;
const UNHEARD_S = 30;
const OPEN_RANKS = 32;

export function rows(snapshot) {
  const told = list(snapshot.nodes);
  const small = told.reduce((sum, node) => sum + list(node.ranks).length, 0) <= OPEN_RANKS;
  const every = told.map((node) => nodeRow(node, small));
  return every.sort((a, b) => a.urgency - b.urgency || (a.order < b.order ? -1 : a.order > b.order ? 1 : 0));
}

export function summary(nodes) {
  if (!nodes.length) return "No node is there.";
  const states = counted(nodes.map((node) => node.state.label));
  const there = nodes.filter((node) => node.state.key !== "gone");
  const doing = there.flatMap((node) => node.cells.map((cell) => cell.doing));
  const told = doing.length ? ` ${plural(doing.length, "rank")}: ${counted(doing)}.` : "";
  return `${plural(nodes.length, "node")}: ${states}.${told}`;
}

export function standingStill(rank) {
  const still = number(rank.still_s);
  const limit = Math.max(STILL_S, STILL_STEPS * (number(rank.step_s) ?? 0));
  return AT_WORK.has(rank.phase) && still !== null && still > limit;
}

export function unheard(node) {
  return node.state !== "gone" && node.state !== "done" && number(node.age_s) !== null && node.age_s > UNHEARD_S;
}

function nodeRow(node, small) {
  const ranks = list(node.ranks);
  const state = named("nodes", node.state);
  const gone = state.key === "gone";
  const cells = ranks.map((rank) => cellOf(rank, gone));
  const known = (key) => ranks.map((rank) => number(rank[key])).filter((value) => value !== null);
  const metrics = text(node.metrics);
  const name = text(node.node) || NONE;
  return {
    node: name,
    order: natural(name),
    host: text(node.host),
    state,
    in_round: Boolean(node.in_round),
    urgency: urgency(node, cells),
    cells,
    summary: cellSummary(cells),
    step: count(least(known("step"))),
    step_time: duration(median(known("step_s").filter(Boolean))),
    slowdown: times(most(known("slowdown"))),
    heard: ago(node.age_s),
    metrics: /^https?:\/\/[^/]/.test(metrics) ? `${metrics}/metrics` : "",
    open: small,
    raw: ranks,
  };
}

function urgency(node, cells) {
  const tests = [
    node.state === "gone",
    cells.some((cell) => cell.trouble === "still"),
    cells.some((cell) => cell.trouble === "slow"),
    unheard(node),
    node.state !== "ready" && node.state !== "done",
    !node.in_round,
  ];
  const place = tests.indexOf(true);
  return place < 0 ? tests.length : place;
}

function troubleOf(rank) {
  if (standingStill(rank)) return "still";
  return rank.straggler ? "slow" : "";
}

const TROUBLES = { slow: " slowly", still: " and standing still", "": "" };

function cellOf(rank, gone) {
  const phase = named("phases", rank.phase);
  const trouble = troubleOf(rank);
  const name = `rank ${count(rank.rank)}`;
  if (gone) return { phase: "gone", mark: "×", trouble: "", doing: "gone", label: `${name} gone` };
  const doing = `${phase.label}${TROUBLES[trouble]}`;
  return { phase: phase.key, mark: trouble ? "!" : phase.mark, trouble, doing, label: `${name} ${doing}` };
}

function cellSummary(cells) {
  if (!cells.length) return "no ranks";
  const calm = counted(cells.filter((cell) => !cell.trouble).map((cell) => cell.doing));
  const troubled = listed(cells.filter((cell) => cell.trouble).map((cell) => cell.label));
  return `${plural(cells.length, "rank")}: ${[calm, troubled].filter(Boolean).join("; ")}`;
}

/** The rows of a node's ranks, which are made only where they are seen. */
export const ranksOf = (node) => node.raw.map(rankRow);

function rankRow(rank) {
  const trouble = troubleOf(rank);
  const remarks = { slow: "slow", still: `no step for ${duration(rank.still_s)}`, "": "" };
  return {
    rank: count(rank.rank),
    local: count(rank.local_rank),
    pid: number(rank.pid) === null ? NONE : String(Math.trunc(rank.pid)),
    device: text(rank.device) || NONE,
    phase: named("phases", rank.phase),
    phase_for: rank.phase_s >= 1 ? lasting(rank.phase_s) : "",
    step: count(rank.step),
    step_time: duration(rank.step_s || null),
    compute: duration(rank.compute_s || null),
    slowdown: times(rank.slowdown),
    trouble,
    remark: remarks[trouble],
  };
}

export function counted(words) {
  const many = new Map();
  for (const word of words) many.set(word, (many.get(word) ?? 0) + 1);
  const sorted = [...many].sort((a, b) => b[1] - a[1]);
  return sorted.map(([word, times]) => `${count(times)} ${word}`).join(", ");
}

const least = (values) => values.reduce((a, b) => (a === null || b < a ? b : a), null);
const most = (values) => values.reduce((a, b) => (a === null || b > a ? b : a), null);

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
