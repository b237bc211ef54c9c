// The page of one run: keeps it up to date by /api/runs/<run>/stream.

import { Page } from "./page.js";
import { root } from "./parts.js";
import { Run } from "./runview.js";
import { whatOf } from "./history.js";
import { named } from "./words.js";

const { run } = document.body.dataset;
const url = `${root}api/runs/${encodeURIComponent(run)}`;

/** Only turns are announced: a page that talks all the time is not listened to. */
function news(now, before) {
  const state = named("states", now.state).label;
  document.title = `${state}: ${run}, elastic-trainer`;
  if (before === null) return "";
  const [last, known] = [now.incidents?.[0], before.incidents?.[0]];
  const incident = last && last.wall !== known?.wall ? `${whatOf(last).label}.` : "";
  return [now.state === before.state ? "" : `${state}.`, incident].filter(Boolean).join(" ");
}

new Page(url, `${url}/stream`, Run, news).start();
