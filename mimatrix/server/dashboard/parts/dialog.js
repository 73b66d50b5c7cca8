// Before something is changed, it is asked whether it should be.

import { send } from "../lib/api.js";
import { refresh, say } from "../lib/session.js";
import { fill, h } from "../lib/dom.js";

/** Ask, and do it on a yes: `act` gets the field's value. A refusal is shown, and can be tried again. */
export function askFirst({ title, text, yes, no = "Leave it", danger = false, field = null, act }) {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const go = h("button", { type: "submit", class: danger ? "danger" : "main" }, yes);
  const box = h(
    "dialog",
    { "aria-labelledby": "ask-title", onclose: () => box.remove() },
    h(
      "form",
      {
        class: "form",
        async onsubmit(event) {
          event.preventDefault();
          go.disabled = true;
          try {
            await act(field?.value);
            box.close();
            refresh();
          } catch (error) {
            fill(wrong, error.message);
          } finally {
            go.disabled = false;
          }
        },
      },
      h("h2", { id: "ask-title" }, title),
      text && h("p", {}, text),
      field && h("div", { class: "field" }, h("label", { for: field.id }, field.dataset.label), field),
      wrong,
      h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => box.close() }, no), go),
    ),
  );
  document.body.append(box);
  box.showModal();
}

export function askCancel(job) {
  askFirst({
    title: `Cancel job ${job.id}?`,
    text: `${job.name} of ${job.user} is ended, wherever it is. It can be tried again later.`,
    yes: "Cancel the job",
    danger: true,
    async act() {
      await send("POST", `/jobs/${job.id}/cancel`);
      say(`Job ${job.id} is told to end.`);
    },
  });
}

export function askRetry(job) {
  askFirst({
    title: `Try job ${job.id} again?`,
    text: "It stands in line once more, and goes on from its last checkpoint if it left one.",
    yes: "Try again",
    async act() {
      await send("POST", `/jobs/${job.id}/retry`);
      say(`Job ${job.id} stands in line again.`);
    },
  });
}

export function askPriority(job) {
  const field = h("input", {
    id: "priority-wanted",
    type: "number",
    min: 0,
    max: 100,
    step: 1,
    required: true,
    value: job.priority,
    "data-label": "From 0 to 100; the higher, the sooner",
  });
  askFirst({
    title: `Priority of job ${job.id}`,
    text: "",
    yes: "Change",
    field,
    async act(value) {
      await send("PATCH", `/jobs/${job.id}`, { priority: Number(value) });
      say(`Job ${job.id} has priority ${value}.`);
    },
  });
}
