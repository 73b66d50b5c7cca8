// Dialogs that ask before something is changed.

import { send } from "../lib/api.js";
import { refresh, say } from "../lib/session.js";
import { fill, h } from "../lib/dom.js";

/** Ask, and call `act` with the value of `field` if confirmed. An error is shown, and can be retried; `closed` is called at the end. */
export function askFirst({ title, text, yes, no = "Keep it", danger = false, field = null, act, closed = null }) {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const go = h("button", { type: "submit", class: danger ? "danger" : "main" }, yes);
  const box = h(
    "dialog",
    { "aria-labelledby": "ask-title", onclose: () => (box.remove(), closed?.()) },
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
    text: `${job.name} of ${job.user} will be stopped. It can be requeued later.`,
    yes: "Cancel the job",
    danger: true,
    async act() {
      await send("POST", `/jobs/${job.id}/cancel`);
      say(`Job ${job.id} is being cancelled.`);
    },
  });
}

export function askRetry(job) {
  askFirst({
    title: `Requeue job ${job.id}?`,
    text: "It returns to the queue, and resumes from its last checkpoint if it has one.",
    yes: "Requeue",
    async act() {
      await send("POST", `/jobs/${job.id}/retry`);
      say(`Job ${job.id} is queued again.`);
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
    "data-label": "From 0 to 100; higher starts sooner",
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
