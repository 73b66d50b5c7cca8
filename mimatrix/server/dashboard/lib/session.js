// The signed-in user, their permissions, and messages to them.

import { h } from "./dom.js";

let me = null;
let again = () => {};

/** The user of the token: {user, role}; null before signing in. */
export const who = () => me;
export const mayHandIn = () => me.role === "admin" || me.role === "user";
export const mayChange = (job) => me.role === "admin" || (me.role === "user" && me.user === job.user);

export function setWho(found) {
  me = found;
}

/** Refresh the view now, since something was changed. */
export const refresh = () => again();

export function onRefresh(action) {
  again = action;
}

/** Show a short message for a while; screen readers announce it. */
export function say(sentence) {
  const line = h("p", {}, sentence);
  document.getElementById("said").append(line);
  setTimeout(() => line.remove(), 6000);
}
