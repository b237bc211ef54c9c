// The page of one run, from its snapshot; templates/run.html has the same for browsers without JavaScript.

import { Component } from "./preact.js";
import { Curves } from "./curves.js";
import * as history from "./history.js";
import * as nodes from "./nodes.js";
import { Nodes } from "./nodetable.js";
import { Figures, Head, Icon, Kept, Part, Scroll, Told, When, html } from "./parts.js";
import * as view from "./view.js";
import { lasting, named, text } from "./words.js";

/** What is computed from a snapshot is kept until the next one: the ages in between need little. */
export class Run extends Component {
  render({ data, now }) {
    if (data !== this.data) {
      this.data = data;
      this.nodes = nodes.rows(data);
      this.summary = nodes.summary(this.nodes);
      this.incidents = history.incidents(data);
      this.attention = view.attention(data);
    }
    const second = Math.floor(now);
    return html`<${First} data=${data} now=${now} attention=${this.attention} last=${this.incidents[0]} />
      <${Summary} data=${data} />
      <${Part} id="course" name="Course">
        <div class="drawn"><${Curves} snapshot=${data} now=${now} /></div>
        <${Samples} data=${data} now=${second} />
      <//>
      <${Part} id="nodes" name="Nodes and ranks"><${Nodes} nodes=${this.nodes} summary=${this.summary} /><//>
      <${Part} id="time" name="Time of all ranks"><${Shares} data=${data} /><//>
      <${Part} id="saves" name="Checkpoints"><${Saves} data=${data} /><//>
      <${Part} id="incidents" name="Incidents"><${Incidents} incidents=${this.incidents} now=${second} /><//>
      <${Part} id="rounds" name="Rounds"><${Rounds} data=${data} now=${second} /><//>`;
  }
}

function First({ data, now, attention, last }) {
  const state = named("states", data.state);
  const since = view.since(data, now);
  const began = history.moment(since === null ? null : now - since);
  return html`<div class="first look-${view.worst(state.look, attention)}">
    <section class="verdict" aria-labelledby="run">
      <h1 id="run">${text(data.run)}</h1>
      <p class="state look-${state.look}">
        <${Icon} look=${state.look} /><strong>${state.label}</strong>
        ${since !== null && html` <time class="for" datetime=${began.iso} title=${began.people}>for ${lasting(since)}</time>`}
      </p>
      <p class="headline">${view.headline(data)}</p>
      ${data.round_reason && html`<p class="aside">${text(data.round_reason)}</p>`}
    </section>
    <section class="attention" aria-labelledby="attention">
      <h2 id="attention">Needs a look</h2>
      ${attention.length
        ? html`<ul>
            ${attention.map((note) => html`<li><${Told} look=${note.look}>${note.words}<//></li>`)}
          </ul>`
        : html`<p class="aside">${view.ended(data) ? "The run has ended." : "Nothing: no node is missing, no rank is slow."}</p>`}
    </section>
    <section class="last" aria-labelledby="last">
      <h2 id="last">Last incident</h2>
      ${last ? html`<${Last} last=${last} now=${now} />` : html`<p class="aside">None is known.</p>`}
    </section>
  </div>`;
}

function Last({ last, now }) {
  return html`<p>
      <strong><${Told} look=${last.look}>${last.what}<//></strong> <span class="aside"><${When} moment=${last.when} now=${now} /></span>
    </p>
    <p>${last.who}</p>
    ${last.sentence && html`<p><strong>${last.sentence}</strong></p>`}
    ${last.reason && html`<p class="aside">${last.reason}</p>`}`;
}

class Summary extends Kept {
  render({ data }) {
    return html`<${Figures} figures=${view.figures(data)} />`;
  }
}

class Samples extends Kept {
  render({ data, now }) {
    const samples = view.samples(data);
    if (!samples.length) return html`<p class="aside">No step has been seen yet.</p>`;
    const columns = [["When"], ["Step", "n"], ["Loss", "n"], ["Step time", "n"], ["Ranks", "n"]];
    return html`<details>
      <summary>The curves as a table</summary>
      <${Scroll} label="Table of the curves">
        <table>
          <${Head} columns=${columns} />
          <tbody>
            ${samples.map(
              ([when, ...values]) => html`<tr>
                <th scope="row"><${When} moment=${when} now=${now} /></th>
                ${values.map((value) => html`<td class="n">${value}</td>`)}
              </tr>`,
            )}
          </tbody>
        </table>
      <//>
    </details>`;
  }
}

class Shares extends Kept {
  render({ data }) {
    const slices = view.slices(data);
    if (!slices.length) return html`<p class="aside">No rank has told of its time yet.</p>`;
    const goodput = view.goodput(data);
    return html`${goodput && html`<p class="summary">${goodput} of it went into new steps.</p>`}
      <svg class="stack" aria-hidden="true" height="20">
        ${slices.map((each) => html`<rect class="p-${each.phase}" x=${each.x} width=${each.width} height="20" />`)}
      </svg>
      <${Scroll} label="Table of the time of all ranks">
        <table class="shares">
          <${Head} columns=${[["Went into"], ["Share", "n"], ["Time", "n"]]} />
          <tbody>
            ${slices.map(
              (each) => html`<tr>
                <th scope="row"><span class="swatch p-${each.phase}"></span>${each.name}</th>
                <td class="n">${each.share}</td>
                <td class="n">${each.time}</td>
              </tr>`,
            )}
          </tbody>
        </table>
      <//>`;
  }
}

class Saves extends Kept {
  render({ data }) {
    const figures = view.checkpoint(data.checkpoint);
    if (!figures.length) return html`<p class="aside">None has been saved or loaded.</p>`;
    return html`<${Figures} figures=${figures} small />`;
  }
}

const INCIDENT_COLUMNS = [
  ["When"],
  ["What"],
  ["Round", "n wide"],
  ["Ranks", "n wide"],
  ["Steps lost", "n"],
  ["Took", "n"],
  ["Notice, regroup, resume", "wide"],
];

class Incidents extends Kept {
  render({ incidents, now }) {
    if (!incidents.length) return html`<p class="aside">None is known.</p>`;
    return html`<${Scroll} label="Table of incidents">
      <table class="incidents">
        <${Head} columns=${INCIDENT_COLUMNS} />
        <tbody>
          ${incidents.map(
            (each) => html`<tr>
              <th scope="row"><${When} moment=${each.when} now=${now} /></th>
              <td>
                <${Told} look=${each.look}>${each.what}:<//> ${each.who}
                ${each.reason && html`<small>${each.reason}</small>`}
              </td>
              <td class="n wide">${each.rounds}</td>
              <td class="n wide">${each.world}</td>
              <td class="n">${each.lost}</td>
              <td class="n">${each.total}</td>
              <td class="wide">${each.parts.length ? html`<${Took} parts=${each.parts} />` : "–"}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>`;
  }
}

function Took({ parts }) {
  return html`<svg class="bar" aria-hidden="true" height="6">
      ${parts.map((part) => html`<rect class="part-${part.name}" x=${part.x} width=${part.width} height="6" />`)}
    </svg>
    <small>${parts.map((part) => html`<span class="key part-${part.name}"></span>${part.time} `)}</small>`;
}

const ROUND_COLUMNS = [
  ["Round", "n"],
  ["State"],
  ["Began"],
  ["Lasted", "n"],
  ["Ranks", "n"],
  ["Nodes", "n wide"],
  ["Why it began, why it ended", "wide"],
];

class Rounds extends Kept {
  render({ data, now }) {
    const rounds = history.rounds(data, now);
    if (!rounds.length) return html`<p class="aside">There was none yet.</p>`;
    return html`<${Scroll} label="Table of rounds">
      <table class="rounds">
        <${Head} columns=${ROUND_COLUMNS} />
        <tbody>
          ${rounds.map(
            (each) => html`<tr key=${each.number}>
              <th scope="row" class="n">${each.number}</th>
              <td><${Told} look=${each.state.look}>${each.state.label}<//></td>
              <td><${When} moment=${each.when} now=${now} /></td>
              <td class="n">${each.lasted}</td>
              <td class="n">${each.world}</td>
              <td class="n wide">${each.nodes}</td>
              <td class="wide">${each.reason}${each.ended && html`<small>${each.ended}</small>`}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    <//>`;
  }
}
