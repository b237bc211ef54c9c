// The map of a large run: a small square for each rank, a block for each node, drawn as one path for each kind of square.

import { Component } from "./preact.js";
import { html, measured } from "./parts.js";
import { NAMES } from "./words.js";

const GAP = 4;

/** Blocks in rows: {width, height, columns, paths: {kind: path}, at(x, y)}. Pure. */
export function layOut(nodes, room) {
  const cell = room < 560 ? 6 : 9;
  const most = Math.max(1, ...nodes.map((node) => node.cells.length));
  const wide = most <= 4 ? most : Math.ceil(most / 2);
  const high = Math.ceil(most / wide);
  const [stepX, stepY] = [wide * cell + GAP, high * cell + GAP];
  const columns = Math.max(1, Math.floor((room + GAP) / stepX));
  const pieces = {};
  nodes.forEach((node, place) => {
    const [left, top] = [(place % columns) * stepX, Math.floor(place / columns) * stepY];
    node.cells.forEach((each, local) => {
      const [x, y] = [left + (local % wide) * cell, top + Math.floor(local / wide) * cell];
      const kind = each.trouble ? "trouble" : each.phase;
      (pieces[kind] ??= []).push(square(kind, x, y, cell - 1));
    });
  });
  const paths = Object.fromEntries(Object.entries(pieces).map(([kind, path]) => [kind, path.join("")]));
  const at = (x, y) => Math.floor(y / stepY) * columns + Math.min(columns - 1, Math.floor(x / stepX));
  return { width: columns * stepX - GAP, height: Math.ceil(nodes.length / columns) * stepY - GAP, paths, at };
}

/** What trains is a plain square; trouble is a lozenge, what is gone a cross: none of them is told by color alone. */
function square(kind, x, y, side) {
  const half = side / 2;
  if (kind === "trouble") return `M${x + half} ${y - 1}l${half + 1} ${half + 1}l${-half - 1} ${half + 1}l${-half - 1} ${-half - 1}z`;
  if (kind === "gone") return `M${x} ${y}l${side} ${side}M${x + side} ${y}l${-side} ${side}`;
  if (kind === "training") return `M${x} ${y}h${side}v${side}h${-side}z`;
  return `M${x} ${y + half}a${half} ${half} 0 1 0 ${side} 0a${half} ${half} 0 1 0 ${-side} 0z`;
}

const label = (kind) => NAMES.phases[kind]?.label ?? { trouble: "slow or standing still", gone: "gone" }[kind] ?? "not known";

export class Fleet extends Component {
  constructor() {
    super();
    this.state = { room: 0, under: null };
    this.place = measured((room) => this.setState({ room }));
    this.move = (event) => {
      const frame = event.currentTarget.getBoundingClientRect();
      this.setState({ under: this.map.at(event.clientX - frame.left, event.clientY - frame.top) });
    };
    this.leave = () => this.setState({ under: null });
  }

  render({ nodes }, { room, under }) {
    const ordered = [...nodes].sort((a, b) => (a.order < b.order ? -1 : 1)); // a node keeps its place
    this.map = room ? this.mapOf(ordered, room) : null;
    const kinds = this.map ? Object.keys(this.map.paths) : [];
    return html`<figure class="fleet" ref=${this.place}>
      ${this.map &&
      html`<svg
        role="img"
        aria-label="Map of all ranks; the table below has the same"
        width=${this.map.width}
        height=${this.map.height}
        onPointerMove=${this.move}
        onPointerLeave=${this.leave}
      >
        ${kinds.map((kind) => html`<path key=${kind} class="p-${kind}" d=${this.map.paths[kind]} />`)}
      </svg>`}
      <figcaption>
        ${kinds.map((kind) => html`<span class="key"><${Key} kind=${kind} />${label(kind)}</span>`)}
        <span class="under">${ordered[under] ? `${ordered[under].node}: ${ordered[under].summary}` : ""}</span>
      </figcaption>
    </figure>`;
  }

  /** The map changes only when a rank changes its phase. */
  mapOf(nodes, room) {
    const sign = `${room}|${nodes.map((node) => `${node.node}:${node.cells.map((c) => c.phase + c.trouble).join()}`).join()}`;
    if (sign !== this.sign) this.laidOut = layOut(nodes, room);
    this.sign = sign;
    return this.laidOut;
  }
}

function Key({ kind }) {
  return html`<svg width="11" height="11" aria-hidden="true"><path class="p-${kind}" d=${square(kind, 1, 1, 8)} /></svg>`;
}
