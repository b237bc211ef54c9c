// What both pages do: take what the feed brings, draw it at most once a frame, and say what changed.

import { render } from "./preact.js";
import { Feed } from "./feed.js";
import { html } from "./parts.js";
import { lasting } from "./words.js";

/** A newer monitor may send what this script, which is as old as the page, does not understand. */
const UNREADABLE = "What the monitor sends cannot be shown. Load this page again.";

export class Page {
  /** `view(data, now)` is what to draw; `news(data, before)` a sentence for screen readers, or nothing. */
  constructor(url, stream, view, news) {
    this.view = view;
    this.news = news;
    this.place = document.getElementById("view");
    this.fresh = document.getElementById("fresh");
    this.said = document.getElementById("said");
    this.drawn = null;
    this.data = null;
    this.look = "";
    this.waiting = false;
    this.clock = Number(document.body.dataset.wall) - loaded();
    this.feed = new Feed(url, stream, () => this.wake());
  }

  start() {
    document.addEventListener("visibilitychange", () => this.wake());
    this.feed.start();
  }

  /** A hidden page draws nothing: it catches up when it is seen again. */
  wake() {
    if (this.waiting || document.hidden) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.update();
    });
  }

  update() {
    try {
      if (this.feed.raw !== this.drawn) this.take(this.feed.raw);
      if (this.data) this.draw();
      this.tell(...this.feed.words(lasting, this.data?.store));
    } catch (error) {
      console.error(error);
      this.tell("lost", UNREADABLE);
    }
  }

  take(raw) {
    this.drawn = raw;
    const before = this.data;
    this.data = JSON.parse(raw);
    const said = this.news(this.data, before);
    if (said) this.said.textContent = said;
    if (Number.isFinite(this.data.wall)) this.clock = this.data.wall - this.feed.arrived / 1000;
  }

  draw() {
    if (this.place.dataset.by !== "script") {
      this.place.dataset.by = "script";
      this.place.replaceChildren();
    }
    render(html`<${this.view} data=${this.data} now=${this.now()} />`, this.place);
  }

  /** The time of the monitor. While nothing comes it stands still: what is shown has not become older than known. */
  now() {
    const stands = ["lost", "missing"].includes(this.feed.state);
    return this.clock + (stands ? this.feed.arrived : performance.now()) / 1000;
  }

  tell(look, words) {
    if (this.fresh.textContent !== words) this.fresh.textContent = words;
    if (look === this.look) return;
    if (look === "lost" || this.look === "lost") this.said.textContent = look === "lost" ? words : "Connected again.";
    this.look = look;
    this.fresh.className = `fresh ${look}`;
    document.body.classList.toggle("stale", look === "lost");
  }
}

/** Seconds of this page's clock at which the server had written it. */
function loaded() {
  return (performance.getEntriesByType("navigation")[0]?.responseStart ?? 0) / 1000;
}
