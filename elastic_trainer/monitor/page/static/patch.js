// Updates the elements of the page to match a text, and keeps what need not change: focus, scrolling, open details.

/** Text that is already markup. */
class Markup {
  constructor(text) {
    this.text = text;
  }
}

/** A template that escapes its values, except other templates and lists of them. */
export function html(strings, ...values) {
  return new Markup(strings.reduce((text, part, place) => text + escaped(values[place - 1]) + part));
}

function escaped(value) {
  if (value instanceof Markup) return value.text;
  if (Array.isArray(value)) return value.map(escaped).join("");
  if (value == null || value === false) return "";
  return String(value).replace(/[&<>"']/g, (each) => `&#${each.charCodeAt(0)};`);
}

/** `markup` is a text from the server, or a template. */
export function mount(place, markup) {
  const focused = document.activeElement;
  const template = document.createElement("template");
  template.innerHTML = markup instanceof Markup ? markup.text : markup;
  children(place, template.content);
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true }); // it was moved
}

function children(place, wanted) {
  const known = new Map([...place.children].filter((each) => each.id).map((each) => [each.id, each]));
  let at = place.firstChild;
  for (const want of [...wanted.childNodes]) {
    const have = want.id ? known.get(want.id) : alike(at, want);
    if (!have) {
      place.insertBefore(want, at);
      continue;
    }
    if (want.id && have !== at) place.insertBefore(have, at);
    else at = dropped(at, have).nextSibling;
    become(have, want);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

/** The next element of its kind: elements before it are no longer on the page. A text matches only at its position. */
function alike(at, want) {
  if (want.nodeType !== Node.ELEMENT_NODE) return at?.nodeName === want.nodeName ? at : null;
  let found = at;
  while (found && (found.nodeName !== want.nodeName || found.id)) found = found.nextSibling;
  return found;
}

function dropped(at, until) {
  for (let each = at; each !== until; ) {
    const next = each.nextSibling;
    if (!each.id) each.remove();
    else until.after(each); // elements with an id are placed separately
    each = next;
  }
  return until;
}

function become(have, want) {
  if (have.isEqualNode(want)) return;
  if (have.nodeType !== Node.ELEMENT_NODE) {
    have.nodeValue = want.nodeValue;
    return;
  }
  for (const { name, value } of want.attributes) if (have.getAttribute(name) !== value) have.setAttribute(name, value);
  for (const { name } of [...have.attributes]) {
    const readers = name === "open" && have.localName === "details";
    if (!want.hasAttribute(name) && !readers) have.removeAttribute(name);
  }
  if (!have.dataset?.drawn) children(have, want);
}
