// The list of runs: the same as listing.py and templates/runs.html, and a test compares the two. Asks /api/runs again and again.

import { moment, whatOf } from "./history.js";
import { counted } from "./nodes.js";
import { Page } from "./page.js";
import { Head, Scroll, Told, When, html, root } from "./parts.js";
import { NONE, count, lasting, list, measure, named, number, percent, text } from "./words.js";

const COLUMNS = [
  ["Run"],
  ["State"],
  ["Step", "n"],
  ["Loss", "n wide"],
  ["Ranks", "n wide"],
  ["Nodes", "n wide"],
  ["Goodput", "n wide"],
  ["Last incident", "wide"],
];

function rowOf(each) {
  const run = text(each.run);
  const last = each.last_incident;
  return {
    run: run || NONE,
    link: `${root}runs/${encodeURIComponent(run)}`,
    state: named("states", each.state),
    state_for: number(each.state_s) === null ? "" : lasting(each.state_s),
    step: count(each.step),
    loss: measure(each.loss),
    ranks: count(each.world_size),
    nodes: nodesOf(each),
    goodput: percent(each.goodput),
    slow: number(each.stragglers) ? `${count(each.stragglers)} slow` : "",
    last: last ? whatOf(last).label : "none",
    last_when: moment(last ? last.wall : null),
  };
}

function nodesOf(each) {
  const [there, least, most] = [number(each.nodes), number(each.min_nodes), number(each.max_nodes)];
  const allowed = least !== null && most !== null ? `${count(least)} to ${count(most)}` : "";
  if (there === null) return allowed || NONE;
  return allowed ? `${count(there)} of ${allowed}` : count(there);
}

function Runs({ data, now }) {
  const rows = list(data.runs).map(rowOf);
  const states = counted(rows.map((row) => row.state.label.toLowerCase()));
  const told = rows.length ? `${rows.length} ${rows.length === 1 ? "run" : "runs"}: ${states}.` : "No run is in the store.";
  return html`<section class="verdict plain">
      <h1>Runs</h1>
      <p class="headline">${told}</p>
    </section>
    ${rows.length
      ? html`<${Scroll} label="Table of runs">
          <table class="runs">
            <${Head} columns=${COLUMNS} />
            <tbody>
              ${rows.map((row) => html`<${Row} key=${row.run} row=${row} now=${now} />`)}
            </tbody>
          </table>
        <//>`
      : html`<p class="empty">A run appears here as soon as its first node has registered.</p>`}`;
}

function Row({ row, now }) {
  return html`<tr>
    <th scope="row"><a href=${row.link}>${row.run}</a></th>
    <td>
      <${Told} look=${row.state.look}>${row.state.label}<//>
      ${row.state_for && html` <span class="aside">for ${row.state_for}</span>`}
      ${row.slow && html` <span class="aside"><${Told} look="warn">${row.slow}<//></span>`}
    </td>
    <td class="n">${row.step}</td>
    <td class="n wide">${row.loss}</td>
    <td class="n wide">${row.ranks}</td>
    <td class="n wide">${row.nodes}</td>
    <td class="n wide">${row.goodput}</td>
    <td class="wide">
      ${row.last}
      ${row.last_when.wall !== null && html` <span class="aside"><${When} moment=${row.last_when} now=${now} /></span>`}
    </td>
  </tr>`;
}

function news(now, before) {
  if (before === null) return "";
  const states = new Map(list(before.runs).map((each) => [each.run, each.state]));
  const turned = list(now.runs).filter((each) => states.get(each.run) !== each.state);
  return turned.map((each) => `${text(each.run)}: ${named("states", each.state).label}.`).join(" ");
}

new Page(`${root}api/runs`, null, Runs, news).start();
