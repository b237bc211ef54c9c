// What several places of the pages are made of; templates/parts.html has the same.

import { Component, h } from "./preact.js";
import htm from "./htm.js";
import { NONE, ago } from "./words.js";

export const html = htm.bind(h);
export const root = document.body.dataset.root;

/** Draws again only when one of its properties is another object or value. */
export class Kept extends Component {
  shouldComponentUpdate(next, state) {
    const names = Object.keys(next);
    return state !== this.state || names.some((name) => name !== "children" && next[name] !== this.props[name]);
  }
}

/** A `ref` that tells how wide its element is, at first and whenever that changes. */
export function measured(tell) {
  let watch = null;
  return (element) => {
    watch?.disconnect();
    if (!element) return;
    watch = new ResizeObserver(() => tell(element.clientWidth));
    watch.observe(element);
  };
}

export function Icon({ look }) {
  return html`<svg class="icon" aria-hidden="true" viewBox="0 0 16 16">
    <use href="${root}static/icons.svg#${look}" />
  </svg>`;
}

export function Told({ look, children }) {
  return html`<span class="told look-${look}"><${Icon} look=${look} />${children}</span>`;
}

export function When({ moment, now }) {
  if (moment.wall === null) return NONE;
  return html`<time datetime=${moment.iso} title=${moment.people}>${ago(now - moment.wall)}</time>`;
}

export function Scroll({ label, children }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>${children}</div>`;
}

export function Part({ id, name, children }) {
  return html`<section class="part" aria-labelledby=${id}>
    <h2 id=${id}>${name}</h2>
    <div>${children}</div>
  </section>`;
}

/** The head of a table from its columns: [name, class]. */
export function Head({ columns }) {
  return html`<thead>
    <tr>
      ${columns.map(([name, look = ""]) => html`<th scope="col" class=${look || null}>${name}</th>`)}
    </tr>
  </thead>`;
}

export function Figures({ figures, small = false }) {
  return html`<dl class=${small ? "figures small" : "figures"}>
    ${figures.map(
      (figure) => html`<div>
        <dt>${figure.name}</dt>
        <dd>${figure.value}${figure.note && html`<small>${figure.note}</small>`}</dd>
      </div>`,
    )}
  </dl>`;
}
