// Elements, and how a part of the page becomes what it should be without losing focus, scroll or open details.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "rect", "line", "path", "text", "title"]);
// Whoever uses the page decides these.
const THEIRS = { DETAILS: ["open"], INPUT: ["value", "checked"], SELECT: ["value"] };

/** An element: `h("a", {href, class, onclick, style: {...}}, "text", more)`. False and null are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (typeof value === "function") listen(element, name, value);
    else if (name === "style") for (const each in value) element.style.setProperty(each, value[each]);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...nodes(children));
  return element;
}

/** In the place of an element with that key which is there and should stay as it is. */
export function staying(tag, key) {
  return Object.assign(h(tag, { "data-key": key }), { stays: true });
}

/** Have `parent` hold just `children`: what is there already is changed in place; `data-key` says what is the same. */
export function fill(parent, ...children) {
  const wanted = nodes(children);
  const keys = new Set(wanted.map(keyOf).filter(Boolean));
  const kept = new Map();
  for (const child of [...parent.childNodes]) {
    const key = keyOf(child);
    if (key && !keys.has(key)) child.remove();
    else if (key) kept.set(key, child);
  }
  let place = parent.firstChild;
  for (const fresh of wanted) {
    const old = known(fresh, place, kept);
    if (!old) parent.insertBefore(fresh, place);
    else {
      if (old === place) place = place.nextSibling;
      else move(parent, old, place);
      become(old, fresh);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function known(fresh, place, kept) {
  const key = keyOf(fresh);
  const old = key ? kept.get(key) : place && !keyOf(place) ? place : null;
  return old && old.nodeName === fresh.nodeName ? old : null;
}

function become(old, fresh) {
  if (fresh.stays) return;
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const theirs = THEIRS[old.tagName] ?? [];
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !theirs.includes(name)) old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    // The policy of the page forbids style as an attribute, and allows it as an object.
    if (name === "style") {
      if (old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
    } else if (!theirs.includes(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const name in fresh.listening ?? {}) listen(old, name, fresh.listening[name]);
  fill(old, ...fresh.childNodes);
}

function listen(element, name, action) {
  element[name] = action;
  element.listening = { ...element.listening, [name]: action };
}

function move(parent, child, place) {
  // Where the browser can, an element moves with its focus.
  if (parent.moveBefore && child.isConnected) parent.moveBefore(child, place);
  else parent.insertBefore(child, place);
}

function keyOf(node) {
  return node.dataset?.key;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== "")
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}
