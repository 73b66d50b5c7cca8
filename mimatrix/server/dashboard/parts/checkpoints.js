// The checkpoints of a job, and the one that it resumes from.

import { h } from "../lib/dom.js";
import { ago, bytes, count, when } from "../lib/format.js";
import { table } from "./plan.js";
import { say } from "../lib/session.js";
import { ended, waits } from "../lib/states.js";

/** The part of a job's page; `saved` are its checkpoints, the newest first. */
export function checkpointsPart(saved, job) {
  return [
    h("h2", {}, "Checkpoints"),
    saved.length ? h("p", { class: "soft" }, resumes(job)) : nothing(job),
    saved.length > 0 &&
      table(
        ["Step", "Saved", "Size", "Directory"],
        saved.map((each) => [
          count(each.step),
          [ago(each.saved_at), " ", h("span", { class: "soft" }, when(each.saved_at))],
          bytes(each.bytes),
          place(each.path),
        ]),
        "saved",
      ),
  ];
}

function resumes(job) {
  // Only checkpoints in the job's own directory are found automatically.
  if ((job.resumes_from ?? null) === null)
    return [
      "Outside the directory ",
      h("code", {}, "MIMATRIX_CHECKPOINTS"),
      ": a restart resumes from them only with ",
      h("code", {}, "run.load(directory)"),
      ".",
    ];
  const step = h("b", {}, `step ${count(job.resumes_from)}`);
  if (ended(job)) return ["“Requeue” resumes from ", step, "."];
  return waits(job)
    ? ["It resumes from ", step, " when it gets devices."]
    : ["After a failure or a preemption it resumes from ", step, "."];
}

function nothing(job) {
  return h(
    "p",
    { class: "soft" },
    ended(job) ? "No checkpoint: “Requeue” starts from the beginning. " : "No checkpoint yet. ",
    "A script saves with ",
    h("code", {}, "run.save()"),
    ", to the directory ",
    h("code", {}, "MIMATRIX_CHECKPOINTS"),
    ".",
  );
}

function place(path) {
  const onclick = (event) => copy(path, event.currentTarget.previousSibling);
  return h(
    "span",
    { class: "path" },
    h("code", {}, path),
    h("button", { type: "button", class: "small", "aria-label": `Copy ${path}`, onclick }, "Copy"),
  );
}

async function copy(path, text) {
  try {
    await navigator.clipboard.writeText(path);
    say("Path copied.");
  } catch {
    // Browsers allow pages to copy only over https or on 127.0.0.1.
    getSelection().selectAllChildren(text);
    say("Path selected; copy it with Ctrl+C.");
  }
}
