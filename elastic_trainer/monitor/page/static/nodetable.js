// Nodes and ranks: a map of all cells for large runs, and the table, of which only what is asked for is drawn.

import { Component } from "./preact.js";
import { Fleet } from "./fleet.js";
import { Head, Kept, Scroll, Told, html } from "./parts.js";
import { ranksOf } from "./nodes.js";
import { plural } from "./words.js";

const SHOWN = 24;
const MANY = 24;

const COLUMNS = [
  ["Node"],
  ["State"],
  ["Ranks"],
  ["Step", "n wide"],
  ["Step time", "n"],
  ["Slowest rank", "n wide"],
  ["Heard", "n wide"],
];
const RANK_COLUMNS = [
  ["Rank", "n"],
  ["Doing"],
  ["Step", "n wide"],
  ["Step time", "n"],
  ["Computing", "n wide"],
  ["Slowdown", "n"],
  ["Device", "wide"],
  ["Process", "n wide"],
];

export class Nodes extends Component {
  constructor() {
    super();
    this.state = { turned: new Map(), all: false, wanted: "" };
    this.toggle = (node) => this.setState({ turned: new Map(this.state.turned).set(node.node, !this.isOpen(node)) });
    this.search = (event) => this.setState({ wanted: event.target.value.trim().toLowerCase() });
  }

  shouldComponentUpdate(next, state) {
    return state !== this.state || next.nodes !== this.props.nodes;
  }

  render({ nodes, summary }) {
    if (!nodes.length) return html`<p class="summary">${summary}</p>`;
    const { wanted, all } = this.state;
    const found = wanted ? nodes.filter((node) => `${node.node} ${node.host}`.toLowerCase().includes(wanted)) : nodes;
    const shown = all ? found : found.slice(0, SHOWN);
    return html`<p class="summary">${summary}</p>
      ${nodes.length > MANY && html`<${Fleet} nodes=${nodes} />`}
      ${nodes.length > MANY &&
      html`<p class="find">
        <label for="find">Find a node</label>
        <input id="find" type="search" autocomplete="off" spellcheck="false" onInput=${this.search} />
        ${wanted && html`<span class="aside" role="status">${plural(found.length, "node")} found</span>`}
      </p>`}
      <${Scroll} label="Table of nodes">
        <table class="nodes">
          <${Head} columns=${COLUMNS} />
          ${shown.map(
            (node) => html`<${Node} key=${node.node} node=${node} open=${this.isOpen(node)} toggle=${this.toggle} />`,
          )}
        </table>
      <//>
      ${found.length > SHOWN &&
      html`<p>
        <button type="button" onClick=${() => this.setState({ all: !all })}>
          ${all ? `Show the first ${SHOWN} only` : `Show all ${plural(found.length, "node")}`}
        </button>
        ${!all && html`<span class="aside"> Those that need a look come first.</span>`}
      </p>`}`;
  }

  isOpen(node) {
    return this.state.turned.get(node.node) ?? node.open;
  }
}

/** One node; a closed one is drawn again only if what it says has changed. */
class Node extends Component {
  shouldComponentUpdate(next) {
    return next.open || next.open !== this.props.open || signOf(next.node) !== signOf(this.props.node);
  }

  render({ node, open, toggle }) {
    const id = `ranks-of-${node.node}`;
    return html`<tbody>
      <tr>
        <th scope="row">
          ${node.raw.length
            ? html`<button
                type="button"
                class="turn"
                aria-expanded=${String(open)}
                aria-controls=${open ? id : null}
                onClick=${() => toggle(node)}
              >
                ${node.node}
              </button>`
            : node.node}
          ${node.host && node.host !== node.node && html`<small>${node.host}</small>`}
        </th>
        <td>
          <${Told} look=${node.state.look}>${node.state.label}<//>
          ${!node.in_round && html`<small>not in the round</small>`}
        </td>
        <td><span class="cells" role="img" aria-label=${node.summary}>${node.cells.map(Cell)}</span></td>
        <td class="n wide">${node.step}</td>
        <td class="n">${node.step_time}</td>
        <td class="n wide">${node.slowdown}</td>
        <td class="n wide">${node.heard}</td>
      </tr>
      ${open && node.raw.length > 0 && html`<${Ranks} node=${node} id=${id} />`}
    </tbody>`;
  }
}

function signOf(node) {
  const cells = node.cells.map((cell) => cell.label + cell.mark);
  const said = [node.state.label, node.in_round, node.step, node.step_time, node.slowdown, node.heard, node.host];
  return [...said, ...cells].join("|");
}

function Cell(cell) {
  const look = cell.trouble ? `cell p-${cell.phase} ${cell.trouble}` : `cell p-${cell.phase}`;
  return html`<i class=${look} title=${cell.label}>${cell.mark}</i>`;
}

function Ranks({ node, id }) {
  return html`<tr class="inner" id=${id}>
    <td colspan="7">
      <table class="ranks">
        <caption class="unseen">Ranks of ${node.node}</caption>
        <${Head} columns=${RANK_COLUMNS} />
        <tbody>
          ${ranksOf(node).map((rank) => html`<${Rank} rank=${rank} />`)}
        </tbody>
      </table>
      ${node.metrics && html`<p class="aside"><a href=${node.metrics} rel="noreferrer">${node.metrics}</a></p>`}
    </td>
  </tr>`;
}

class Rank extends Kept {
  render({ rank }) {
    const look = rank.trouble === "still" ? "bad" : "warn";
    return html`<tr>
      <th scope="row" class="n">${rank.rank}</th>
      <td>
        <span class="swatch p-${rank.phase.key}"></span>${rank.phase.label} <span class="aside">${rank.phase_for}</span>
        ${rank.remark && html` <${Told} look=${look}>${rank.remark}<//>`}
      </td>
      <td class="n wide">${rank.step}</td>
      <td class="n">${rank.step_time}</td>
      <td class="n wide">${rank.compute}</td>
      <td class="n">${rank.slowdown}</td>
      <td class="wide">${rank.device}</td>
      <td class="n wide">${rank.pid}</td>
    </tr>`;
  }
}
