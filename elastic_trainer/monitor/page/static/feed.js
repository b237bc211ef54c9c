// Fetches the page's newest text: by server-sent events if they get through, otherwise by polling.

const SILENT_S = 10; // without an event for this long the stream may be dead
const POLL_S = 2;
const STREAM_AGAIN_S = 15;
const TIMEOUT_S = 8;
const STALE_S = 20; // longer than it takes to detect a silent stream and a failed poll

export class Feed {
  /** `stream` may be null: then it only polls. `changed` is called for news and for each change of the state. */
  constructor(url, stream, changed) {
    this.url = url;
    this.stream = stream;
    this.changed = changed;
    this.query = "";
    this.streamed = null; // the stream's text so far, which its next event edits
    this.shown = null;
    this.garbled = false;
    this.state = "starting";
    this.arrived = null;
    this.asked = -Infinity;
    this.opened = -Infinity;
    this.source = null;
    this.polling = false;
  }

  start(query) {
    this.query = query;
    this.tick();
    setInterval(() => this.tick(), 1000);
    document.addEventListener("visibilitychange", () => this.tick());
    addEventListener("online", () => this.tick());
  }

  /** Switch to another view. */
  turn(query) {
    this.query = query;
    this.source?.close();
    this.source = null;
    if (this.stream) this.listen(performance.now() / 1000);
    this.poll(performance.now() / 1000);
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
    this.streamed = null;
    const source = new EventSource(this.stream + this.query);
    this.source = source;
    source.onmessage = (event) => {
      if (source === this.source) this.streamed = this.accept(event.data, this.streamed, "stream");
    };
    source.onerror = () => {
      if (source !== this.source) return;
      if (this.state === "stream") this.state = "poll";
      this.tick();
    };
  }

  /** The stream is open but silent, and may never end by itself. */
  giveUp(now) {
    this.source?.close();
    this.source = null;
    this.opened = now;
    this.state = "poll";
  }

  async poll(now) {
    this.polling = true;
    this.asked = now;
    const { query } = this;
    try {
      const answer = await fetch(this.url + query, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_S * 1000) });
      const raw = await answer.text();
      if (query !== this.query) this.asked = -Infinity; // another view has been chosen meanwhile
      else if (answer.ok) this.accept(raw, null, "poll");
      else this.fail(answer.status === 404 ? "missing" : "lost");
    } catch {
      this.fail("lost");
    }
    this.polling = false;
  }

  /** Applies the message `raw` to `before`; null if it cannot be read. */
  accept(raw, before, by) {
    let made = null;
    try {
      made = renewed(JSON.parse(raw), before);
    } catch (error) {
      console.error(error);
    }
    this.garbled = made === null;
    this.state = by;
    this.arrived = performance.now();
    if (made) this.shown = made;
    else if (by === "stream") this.giveUp(this.arrived / 1000);
    this.changed();
    return made;
  }

  fail(state) {
    this.state = state;
    this.changed();
  }

  /** [look, words] for the top of the page. `store`: the state of the monitor's own source. */
  words() {
    const store = this.shown?.store;
    const age = this.age();
    const old = (age ?? 0) + (store?.age_s ?? 0);
    const data = age === null ? "No data has arrived yet." : `This page is ${lasting(old)} old.`;
    if (this.state === "starting") return ["busy", "Connecting"];
    if (this.state === "missing") return ["lost", `The run is no longer in the store. ${data}`];
    if (this.state === "lost") return ["lost", `Connection lost. ${data}`];
    if (store && store.connected === false) return ["lost", `The monitor cannot reach the store. ${data}`];
    if (old >= STALE_S) return ["lost", `No news. ${data}`];
    const how = this.state === "stream" || !this.stream ? "Live" : "Live by polling";
    return ["live", `${how}, ${Math.round(old)} s old`];
  }
}

/** The texts after the edits of `message`, which are ordered from the last line to the first. */
function renewed(message, before) {
  if (!message.full && !before) throw new Error("an update of nothing");
  const made = { store: message.store };
  for (const name of ["view", "course"]) {
    made[name] = message.full ? [] : [...before[name]];
    for (const [start, removed, lines] of message[name]) made[name].splice(start, removed, ...lines);
  }
  return made;
}

function lasting(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"]];
  const [size, unit] = units.find(([each]) => seconds >= each) ?? [1, "s"];
  return `${Math.round(seconds / size)} ${unit}`;
}
