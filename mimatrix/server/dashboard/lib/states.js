// The states of a job as people see them.

import { h } from "./dom.js";

export const RUNNING = ["starting", "profiling", "training", "saving"];
export const WAITING = ["queued", "preempted"];
export const ENDED = ["done", "failed", "cancelled"];

export const runs = (job) => RUNNING.includes(job.state);
export const waits = (job) => WAITING.includes(job.state);
export const ended = (job) => ENDED.includes(job.state);

/** The devices that a job has, or had last, in the order of its ranks. */
export const allocationOf = (job) => (job.allocation.length ? job.allocation : (job.last_allocation ?? []));

/** A word with a mark; the colour is never alone. */
export function chip(state) {
  const look = RUNNING.includes(state) ? "running" : WAITING.includes(state) ? "waiting" : state;
  return h("span", { class: `chip ${look}` }, state);
}

/** `state=a&state=b` */
export const asked = (states) => states.map((state) => `state=${state}`).join("&");
