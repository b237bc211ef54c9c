// Brings the newest JSON: by server-sent events where they come through, else by asking again and again.

const SILENT_S = 10; // so long without an event, and the stream may be dead
const POLL_S = 2;
const STREAM_AGAIN_S = 15;
const TIMEOUT_S = 8;
const STALE_S = 20; // longer than it takes to find a silent stream out and to be refused an answer

export class Feed {
  /** `stream` may be null: then it only polls. `changed` is called for news and for each turn of the state. */
  constructor(url, stream, changed) {
    this.url = url;
    this.stream = stream;
    this.changed = changed;
    this.raw = null;
    this.state = "starting";
    this.arrived = null;
    this.asked = -Infinity;
    this.opened = -Infinity;
    this.source = null;
    this.polling = false;
  }

  start() {
    this.tick();
    setInterval(() => this.tick(), 1000);
    document.addEventListener("visibilitychange", () => this.tick());
    addEventListener("online", () => this.tick());
  }

  /** Seconds since the newest data came. */
  age() {
    return this.arrived === null ? null : (performance.now() - this.arrived) / 1000;
  }

  tick() {
    const now = performance.now() / 1000;
    if (this.source?.readyState === EventSource.CLOSED) this.source = null;
    if (this.stream && !this.source && now - this.opened > STREAM_AGAIN_S) this.listen(now);
    const patience = this.state === "stream" ? SILENT_S : POLL_S;
    const waited = Math.min(this.age() ?? Infinity, now - this.asked);
    const first = this.stream && this.state === "starting" && now - this.opened < POLL_S;
    if (waited >= patience && !this.polling && !first) {
      if (this.state === "stream") this.giveUp(now);
      this.poll(now);
    }
    this.changed();
  }

  listen(now) {
    this.opened = now;
    this.source = new EventSource(this.stream);
    this.source.onmessage = (event) => this.accept(event.data, "stream");
    this.source.onerror = () => {
      if (this.state === "stream") this.state = "poll";
      this.tick();
    };
  }

  /** The stream is there, but nothing comes: it may never end by itself. */
  giveUp(now) {
    this.source?.close();
    this.source = null;
    this.opened = now;
    this.state = "poll";
  }

  async poll(now) {
    this.polling = true;
    this.asked = now;
    try {
      const answer = await fetch(this.url, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_S * 1000) });
      if (answer.ok) this.accept(await answer.text(), "poll");
      else this.fail(answer.status === 404 ? "missing" : "lost");
    } catch {
      this.fail("lost");
    }
    this.polling = false;
  }

  accept(raw, by) {
    this.raw = raw;
    this.state = by;
    this.arrived = performance.now();
    this.changed();
  }

  fail(state) {
    this.state = state;
    this.changed();
  }

  /** [look, words] for the top of the page. `store`: what the data itself says of its source. */
  words(lasting, store) {
    const age = this.age();
    const old = (age ?? 0) + (store?.age_s ?? 0);
    const data = age === null ? "Nothing has come yet." : `What you see is ${lasting(Math.round(old))} old.`;
    if (this.state === "starting") return ["busy", "Connecting"];
    if (this.state === "missing") return ["lost", `The store has no such run any more. ${data}`];
    if (this.state === "lost") return ["lost", `Connection lost. ${data}`];
    if (store && store.connected === false) return ["lost", `The monitor does not reach the store. ${data}`];
    if (old >= STALE_S) return ["lost", `No news. ${data}`];
    const how = this.state === "stream" || !this.stream ? "Live" : "Live by polling";
    return ["live", `${how}, ${Math.round(old)} s old`];
  }
}
