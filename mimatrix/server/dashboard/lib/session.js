// Who looks, what they may do, and how any part of the page speaks to them.

import { h } from "./dom.js";

let me = null;
let again = () => {};

/** The bearer of the token: {user, role}; null before they signed in. */
export const who = () => me;
export const mayHandIn = () => me.role === "admin" || me.role === "user";
export const mayChange = (job) => me.role === "admin" || (me.role === "user" && me.user === job.user);

export function setWho(found) {
  me = found;
}

/** Ask for the view's figures now, since something was changed. */
export const refresh = () => again();

export function onRefresh(action) {
  again = action;
}

/** A short sentence about what was done, read out and shown for a while. */
export function say(sentence) {
  const line = h("p", {}, sentence);
  document.getElementById("said").append(line);
  setTimeout(() => line.remove(), 6000);
}
