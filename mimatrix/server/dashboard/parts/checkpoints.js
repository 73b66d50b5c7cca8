// What a job has saved, and from where it would go on.

import { h } from "../lib/dom.js";
import { ago, bytes, count, when } from "../lib/format.js";
import { table } from "./plan.js";
import { say } from "../lib/session.js";
import { ended, waits } from "../lib/states.js";

/** `saved` are the checkpoints, the newest first. */
export function checkpointsPart(saved, job) {
  return [
    h("h2", {}, "Checkpoints"),
    saved.length ? h("p", { class: "soft" }, goesOn(saved, job)) : nothing(job),
    saved.length > 0 &&
      table(
        ["Step", "Saved", "Size", "Folder"],
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

function goesOn(saved, job) {
  // Only what lies in the job's own folder is found again by itself.
  const found = saved.find((each) => new RegExp(`/job-${job.id}/[^/]+$`).test(each.path));
  if (!found)
    return [
      "Not in the folder that ",
      h("code", {}, "MIMATRIX_CHECKPOINTS"),
      " names: a new start goes on from them only with ",
      h("code", {}, "run.load(folder)"),
      ".",
    ];
  const step = h("b", {}, `step ${count(found.step)}`);
  if (ended(job)) return ["“Try again” goes on from ", step, "."];
  return waits(job)
    ? ["It goes on from ", step, " as soon as it has devices."]
    : ["If it is lost or has to make room, it goes on from ", step, "."];
}

function nothing(job) {
  return h(
    "p",
    { class: "soft" },
    ended(job) ? "It has saved nothing: “Try again” begins anew. " : "Nothing is saved yet. ",
    "A script saves with ",
    h("code", {}, "run.save()"),
    ", to the folder that ",
    h("code", {}, "MIMATRIX_CHECKPOINTS"),
    " names.",
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
    say("The path is copied.");
  } catch {
    // Browsers let a page copy only over https or on 127.0.0.1.
    getSelection().selectAllChildren(text);
    say("The path is selected; copy it with Ctrl C.");
  }
}
