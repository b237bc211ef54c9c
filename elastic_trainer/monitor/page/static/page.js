// Mounts the server's updates as they arrive, and announces changes of state.

import { Curves } from "./curves.js";
import { Feed } from "./feed.js";
import { mount } from "./patch.js";

/** A newer monitor may send updates that this script, which is as old as the page, cannot read. */
const UNREADABLE = "The update from the monitor cannot be shown. Reload this page.";
const TYPED_MS = 200;

const { root, run } = document.body.dataset;
const view = document.getElementById("view");
const fresh = document.getElementById("fresh");
const said = document.getElementById("said");
const base = run ? `${root}runs/${encodeURIComponent(run)}/` : root;

let curves = null;
let mounted = null;
let look = "";
let waiting = false;
let typed = 0;

const feed = new Feed(`${base}update`, run ? `${base}stream` : null, wake);

/** A hidden page draws nothing: it catches up when it becomes visible. */
function wake() {
  if (waiting || document.hidden) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (feed.shown && feed.shown !== mounted) show(feed.shown);
    tell(...(feed.garbled ? ["lost", UNREADABLE] : feed.words()));
  });
}

function show(shown) {
  mounted = shown;
  const before = sayings();
  mount(view, shown.view.join("\n"));
  view.dataset.by = "script";
  const news = [...sayings()].filter(([key]) => !before.has(key)).map(([, words]) => words);
  if (news.length) said.textContent = news.join(" ");
  const title = view.querySelector("[data-title]");
  if (title) document.title = title.dataset.title;
  const place = view.querySelector("[data-drawn=curves]");
  if (!place) return;
  curves ??= new Curves(place);
  curves.show(shown.course.map((line) => JSON.parse(line)));
}

/** Announces only changes of state: readers would ignore constant announcements. */
function sayings() {
  const each = [...view.querySelectorAll("[data-said]")];
  return new Map(each.map(({ dataset }) => [`${dataset.said} ${dataset.at ?? ""}`, dataset.said]));
}

function tell(now, words) {
  if (fresh.textContent !== words) fresh.textContent = words;
  if (now === look) return;
  if (now === "lost" || look === "lost") said.textContent = now === "lost" ? words : "Connected again.";
  look = now;
  fresh.className = `fresh ${look}`;
  document.body.classList.toggle("stale", look === "lost");
}

/** A reader's choices are a form's query, so they have a URL and the server renders them. */
function choose(form, button) {
  const query = `?${new URLSearchParams(new FormData(form, button))}`;
  history.replaceState(null, "", query);
  feed.turn(query);
}

view.addEventListener("submit", (event) => {
  event.preventDefault();
  choose(event.target, event.submitter);
});
view.addEventListener("input", ({ target }) => {
  if (target.name !== "find") return;
  clearTimeout(typed);
  typed = setTimeout(() => choose(target.form), TYPED_MS);
});
document.addEventListener("visibilitychange", wake);
feed.start(location.search);
