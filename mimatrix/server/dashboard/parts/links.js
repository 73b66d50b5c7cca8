// A node's link to its switch: the fuller, the thicker; and always in figures.

import { h } from "../lib/dom.js";
import { percent, rate } from "../lib/format.js";

const NEARLY_FULL = 0.8;
// Where nobody tells what a link can carry it is drawn as one of 10 Gbit/s.
const USUAL_BYTES_PER_S = 1.25e9;
const THINNEST_PX = 1.5;
const THICKEST_PX = 10;
// Below 1, so that a hundredth can be told from a tenth.
const CURVE = 0.4;

/** The wire, and what it carries in words. */
export function link(node) {
  const { traffic } = node;
  if (!node.answers) return wire("broken");
  if (!traffic) return [wire("unknown"), h("p", { class: "carried" }, h("span", { class: "in soft" }, whyNot(node)))];
  const { received_bytes_per_s: received, sent_bytes_per_s: sent, capacity_bytes_per_s: capacity } = traffic;
  return [
    wire("", received, sent, capacity),
    h(
      "p",
      { class: "carried", title: `Interface ${traffic.nic}` },
      figure("in", received, capacity),
      figure("out", sent, capacity),
      capacity && h("span", { class: "of soft" }, `of ${rate(capacity)}`),
    ),
  ];
}

/** What the thickness says. */
export function scale() {
  const parts = { "1 %": 0.01, "20 %": 0.2, full: 1 };
  return h(
    "span",
    { class: "key" },
    "link ",
    Object.entries(parts).map(([word, part]) => [h("i", { class: "wired", style: { height: thick(part) } }), word]),
  );
}

function wire(look, received = 0, sent = 0, capacity = null) {
  const lane = (way, carried) => {
    const part = carried / (capacity || USUAL_BYTES_PER_S);
    return h("i", { class: `${way} ${isFull(part, capacity) ? "full" : ""}`, style: { height: thick(part) } });
  };
  const lanes = look ? h("i", {}) : [lane("in", received), lane("out", sent)];
  return h("span", { class: `wire ${look}`, "aria-hidden": "true" }, lanes);
}

function figure(way, carried, capacity) {
  const part = carried / capacity;
  return h(
    "span",
    { class: `${way} ${isFull(part, capacity) ? "full" : ""}` },
    `${rate(carried)} ${way}`,
    capacity && [", ", h("b", {}, part > 0 && part < 0.01 ? "< 1 %" : percent(part))],
  );
}

function whyNot(node) {
  const works = node.devices.some((device) => device.job !== null);
  return works ? "no figures: its worker tells none" : "no figures: no worker runs here";
}

const isFull = (part, capacity) => Boolean(capacity) && part >= NEARLY_FULL;

function thick(part) {
  return `${(THINNEST_PX + (THICKEST_PX - THINNEST_PX) * Math.min(1, part) ** CURVE).toFixed(1)}px`;
}
