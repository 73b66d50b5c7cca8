// The form that submits a job: a script, further files, and the devices that it needs.

import { has, send, upload } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { bytes } from "../lib/format.js";
import { mayHandIn, say } from "../lib/session.js";
import { archive, digest } from "../lib/tar.js";

const MOST_BYTES = 64 * 2 ** 20;

export function submitView() {
  const title = "Submit a job";
  const cannot = whyNot();
  const element = h(
    "div",
    { class: "page narrow-page" },
    h("div", { class: "head" }, h("h1", {}, title)),
    cannot ? h("p", { class: "empty" }, cannot) : form(),
  );
  return { title, element };
}

function whyNot() {
  if (!mayHandIn()) return "Viewers cannot submit jobs. Ask an admin for the user role.";
  const command = h("code", {}, "mimatrix submit train.py");
  if (!globalThis.crypto?.subtle)
    return [
      "Browsers allow pages to hash files only over https or on 127.0.0.1. From a terminal: ",
      command,
    ];
  if (!globalThis.CompressionStream)
    return ["This browser is too old to compress files. From a terminal: ", command];
  return null;
}

function form() {
  const script = h("input", { id: "script", type: "file", accept: ".py", required: true, onchange: named });
  const files = h("input", { id: "files", type: "file", multiple: true });
  const name = h("input", {
    id: "job-name",
    type: "text",
    required: true,
    maxlength: 100,
    pattern: "[A-Za-z0-9][A-Za-z0-9._ \\-]*",
    autocomplete: "off",
  });
  const devices = h("input", {
    id: "devices",
    type: "text",
    required: true,
    value: "1",
    autocomplete: "off",
    spellcheck: "false",
  });
  const priority = h("input", { id: "priority", type: "number", min: 0, max: 100, required: true, value: "50" });
  const words = h("input", {
    id: "arguments",
    type: "text",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: '--lr 0.1 --note "two words"',
  });
  const hours = h("input", { id: "hours", type: "number", min: 0, step: "any" });
  const retries = h("input", { id: "retries", type: "number", min: 0, max: 100, value: "0" });
  const preemptible = h("input", { id: "preemptible", type: "checkbox" });
  const wrong = h("p", { class: "wrong", role: "alert" });
  const would = h("p", { class: "soft", role: "status" });
  const go = h("button", { type: "submit", class: "main" }, "Submit");
  const check = h("button", { type: "button", onclick: () => attempt(dryRun) }, "Dry run");

  let keyed = { text: "", key: "" };

  function named() {
    if (script.files[0] && !name.value)
      name.value = script.files[0].name
        .replace(/\.py$/, "")
        .replace(/[^A-Za-z0-9._ -]/g, "-")
        .replace(/^[^A-Za-z0-9]+/, "");
  }

  const said = (sha256) => ({
    name: name.value.trim(),
    script: script.files[0].name,
    code_archive: sha256,
    arguments: split(words.value),
    devices: devices.value.trim(),
    priority: Number(priority.value),
    preemptible: preemptible.checked,
    max_restarts: Number(retries.value || 0),
    max_time_s: Number(hours.value) > 0 ? Number(hours.value) * 3600 : null,
  });

  async function dryRun() {
    const found = await send("POST", "/jobs/dry-run", said("0".repeat(64)));
    fill(would, `It would ${found.starts ? "start immediately" : "wait"}: ${found.reason}.`);
  }

  /** The same form has the same key: if its answer was lost, submitting again is not another job. */
  function withKey(submission) {
    const text = JSON.stringify(submission);
    if (text !== keyed.text) keyed = { text, key: crypto.randomUUID() };
    return { ...submission, key: keyed.key };
  }

  async function submit() {
    const packed = await archive(await read([script.files[0], ...files.files]));
    if (packed.length > MOST_BYTES)
      throw new Error(
        `The compressed files have ${bytes(packed.length)}; the limit is ${bytes(MOST_BYTES)}. Leave data where the job can read it.`,
      );
    const sha256 = await digest(packed);
    if (!(await has(`/code-archives/${sha256}`))) await upload(`/code-archives/${sha256}`, packed);
    const job = await send("POST", "/jobs", withKey(said(sha256)));
    say(`Job ${job.id} is submitted.`);
    location.hash = `#/jobs/${job.id}`;
  }

  async function attempt(act) {
    fill(wrong);
    fill(would);
    if (!element.reportValidity()) return;
    go.disabled = check.disabled = true;
    try {
      await act();
    } catch (error) {
      fill(wrong, error.message);
    } finally {
      go.disabled = check.disabled = false;
    }
  }

  const element = h(
    "form",
    { class: "card form", onsubmit: (event) => (event.preventDefault(), attempt(submit)) },
    field("Script", script, "A Python file, as for torchrun"),
    field("Further files", files, "Placed next to the script. For whole directories use mimatrix submit"),
    field("Name", name, "Letters, digits, dots, dashes and spaces"),
    h(
      "div",
      { class: "pair" },
      field("Devices", devices, "2, or a100:2,v100:4, or 2..8, or all"),
      field("Priority", priority, "From 0 to 100; higher starts sooner"),
    ),
    field("Arguments", words),
    h(
      "details",
      {},
      h("summary", {}, "More"),
      h(
        "div",
        { class: "pair" },
        field("Time limit in hours", hours, "Empty: unlimited"),
        field("Restarts after a failure", retries),
      ),
      h("label", { class: "check" }, preemptible, "Preemptible: may be saved and requeued for a more urgent job"),
    ),
    wrong,
    would,
    h("div", { class: "buttons" }, check, go),
  );
  return element;
}

function field(word, control, hint) {
  if (hint) control.setAttribute("aria-describedby", `${control.id}-hint`);
  return h(
    "div",
    { class: "field" },
    h("label", { for: control.id }, word),
    control,
    hint && h("p", { class: "hint", id: `${control.id}-hint` }, hint),
  );
}

async function read(files) {
  const found = new Map();
  for (const file of files) found.set(file.name, new Uint8Array(await file.arrayBuffer()));
  return [...found].map(([name, content]) => ({ name, bytes: content }));
}

/** Split a command line into arguments as a shell does; quotes group words. */
export function split(line) {
  return [...line.matchAll(/(?:[^\s"']+|"[^"]*"|'[^']*')+/g)].map(([word]) =>
    word.replace(/"([^"]*)"|'([^']*)'/g, "$1$2"),
  );
}
