// The plan: who does how much and why, and whether it came out so.

import { h } from "../lib/dom.js";
import { brief, bytes, count, figure, percent } from "../lib/format.js";
import { busy } from "./ranks.js";

export function planPart(plan, ranks, job) {
  const measured = new Map(ranks.map((rank) => [rank.rank, rank]));
  const version = plan.version ? `, version ${plan.version}` : "";
  return [
    h("h2", {}, "Plan"),
    h("p", { class: "soft" }, `ZeRO stage ${plan.stage}, ${count(plan.global_batch)} samples a step${version}`),
    against(plan, job),
    table(
      ["Rank", "Micro-batches", "Samples", "Busy, predicted", "Busy, measured", "Idle, predicted", "Memory used"],
      plan.parts.map((part, rank) => [
        [rank, " ", h("span", { class: "soft" }, part.name)],
        grouped(plan.split[rank]),
        count(plan.split[rank].reduce((sum, size) => sum + size, 0)),
        brief(part.busy_s),
        measured.has(rank) ? [brief(busy(measured.get(rank))), " ", off(busy(measured.get(rank)), part.busy_s)] : "–",
        brief(part.idle_s),
        part.room_bytes > 0
          ? [bytes(part.memory_bytes), " ", h("span", { class: "soft" }, percent(part.memory_bytes / part.room_bytes))]
          : bytes(part.memory_bytes),
      ]),
    ),
    h("h3", {}, "Reasons"),
    h(
      "ul",
      { class: "reasons" },
      [...plan.reasons, plan.why].filter(Boolean).map((reason) => h("li", {}, reason)),
    ),
    plan.left_out.length > 0 && [
      h("h3", {}, "Left out"),
      h(
        "ul",
        { class: "reasons" },
        plan.left_out.map((each) => h("li", {}, h("b", {}, each.name), ": ", each.reason)),
      ),
    ],
  ];
}

function against(plan, job) {
  const { step_s: step_s, samples_per_s: rate } = job.progress;
  const row = (word, predicted, measured, show) => [
    word,
    show(predicted),
    measured > 0 ? show(measured) : "–",
    measured > 0 ? off(measured, predicted) : "–",
  ];
  return table(
    ["", "Predicted", "Measured", "Error"],
    [
      row("Step time", plan.step_s, step_s, brief),
      row("Samples/s", plan.samples_per_s, rate, figure),
      ["Exposed communication", brief(plan.communication_s), "", ""],
    ],
    "narrow",
  );
}

function off(measured, predicted) {
  if (!predicted) return "";
  const part = measured / predicted - 1;
  return h(
    "span",
    { class: Math.abs(part) > 0.15 ? "off" : "soft" },
    `${part < 0 ? "−" : "+"}${Math.abs(part * 100).toFixed(0)} %`,
  );
}

/** 3 × 16 + 8 */
function grouped(sizes) {
  const runs = [];
  for (const size of sizes) {
    if (runs.at(-1)?.size === size) runs.at(-1).times += 1;
    else runs.push({ size, times: 1 });
  }
  return runs.map(({ size, times }) => (times > 1 ? `${times} × ${size}` : `${size}`)).join(" + ") || "none";
}

/** On a narrow screen every row becomes a card; the roles keep it a table for those who hear it. */
export function table(heads, rows, look = "") {
  return h(
    "table",
    { class: look, role: "table" },
    h(
      "thead",
      { role: "rowgroup" },
      h(
        "tr",
        { role: "row" },
        heads.map((head) => (head ? h("th", { scope: "col", role: "columnheader" }, head) : h("td", { role: "cell" }))),
      ),
    ),
    h(
      "tbody",
      { role: "rowgroup" },
      rows.map((cells) =>
        h(
          "tr",
          { role: "row" },
          cells.map((cell, at) =>
            at
              ? h("td", { role: "cell", "data-head": heads[at] }, cell)
              : h("th", { scope: "row", role: "rowheader" }, cell),
          ),
        ),
      ),
    ),
  );
}
