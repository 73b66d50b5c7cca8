// Where the time of a step goes, rank by rank: as parts of the step, and as a timeline.

import { now } from "../lib/api.js";
import { h } from "../lib/dom.js";
import { brief, count, figure, percent, span } from "../lib/format.js";
import { refresh } from "../lib/session.js";
import { allocationOf } from "../lib/states.js";

const MOST = 16;
/** Ranks report every few seconds. */
const SILENT_S = 15;
/** A rank that is waited for so long will hardly come. */
const HANGS_S = 30;
// Whoever wanted to see all of them wants so on the next page, too.
let all = false;
/** In the order of a step. */
const PARTS = [
  ["data_s", "loading", "load"],
  ["compute_s", "computing", "compute"],
  ["communication_s", "communicating", "comm"],
  ["waiting_s", "waiting", "idle"],
];

const PUSHED = ["pushes", "samples", "staleness", "moved_s", "waited_s"];

/** Busy: what others would wait for. */
export const busy = (rank) => rank.compute_s + rank.data_s;

/** Whether it has told of a step. */
export const steps = (rank) => total(rank) > 0;

/** What kind of straggler it is, in a few words. */
export function titleOf(straggler) {
  if (straggler.kind !== "hang") return "Straggler";
  return straggler.lost_s < HANGS_S ? "Ranks are waiting" : "Hang";
}

/** Ranks as the last point of a job's history has them. */
export function latest(job, points) {
  const last = points.findLast((point) => point.ranks.compute_s?.length);
  if (!last) return [];
  const of = (name, rank) => last.ranks[name]?.[rank] ?? 0;
  const pushes = last.ranks.group_pushes ?? [];
  const known = (rank) => pushes[rank] !== null && pushes[rank] !== undefined;
  const groups = job.groups ?? [];
  return last.ranks.compute_s.map((_, rank) => ({
    rank,
    // Where the job was submitted without groups, its ranks formed them.
    group: groups.length ? groups.findIndex((group) => group.includes(rank)) : of("group", rank),
    pushed: known(rank)
      ? Object.fromEntries(PUSHED.map((name) => [name, of(`group_${name}`, rank)]))
      : null,
    device: allocationOf(job)[rank] ?? "",
    step_s: last.step_s,
    samples: 0,
    planned_s: null,
    use: null,
    ...Object.fromEntries(PARTS.map(([name]) => [name, of(name, rank)])),
  }));
}

/** A bar for each rank: which part of its step it computes, communicates, waits. */
export function bars(ranks, stragglers, live) {
  return [
    h("div", { class: "line" }, h("h2", {}, "Ranks"), legend()),
    h(
      "p",
      { class: "soft" },
      live ? "Parts of a step, as last reported." : "Parts of a step, at the end of the job.",
    ),
    h(
      "ul",
      { class: "ranks" },
      chosen(ranks, stragglers).map((rank) =>
        bar(
          rank,
          stragglers.find((each) => each.rank === rank.rank),
        ),
      ),
    ),
    rest(ranks, stragglers),
  ];
}

function bar(rank, straggler) {
  const whole = Math.max(total(rank), 1e-9);
  const said = PARTS.map(([name, word]) => `${word} ${percent(rank[name] / whole)}`).join(", ");
  return h(
    "li",
    { "data-key": rank.rank, class: straggler ? "slow" : "" },
    h(
      "span",
      { class: "label" },
      h("b", {}, `Rank ${rank.rank}`),
      " ",
      h("span", { class: "soft" }, rank.device),
      straggler && h("span", { class: "mark" }, words(straggler)),
      age(rank) > SILENT_S && h("span", { class: "bad" }, `said ${span(age(rank))} ago`),
    ),
    h(
      "span",
      { class: "bar", role: "img", "aria-label": `Rank ${rank.rank}: ${said}` },
      PARTS.map(([name, , look]) => h("i", { class: look, style: { width: `${(100 * rank[name]) / whole}%` } })),
    ),
    h("span", { class: "soft small" }, facts(rank)),
  );
}

function words(straggler) {
  if (straggler.kind === "hang") return straggler.lost_s < HANGS_S ? "waited for" : "hangs";
  return `slow${straggler.cause ? `: ${straggler.cause}` : ""}`;
}

/** Of its figures, in seconds; 0 where it is not known. */
const age = (rank) => (rank.at ? (now() - new Date(rank.at)) / 1000 : 0);

function facts(rank) {
  const use = rank.use ?? {};
  return [
    `busy ${brief(busy(rank))}`,
    rank.planned_s && `planned ${brief(rank.planned_s)}`,
    rank.samples > 0 && `${count(rank.samples)} samples`,
    use.busy !== null && use.busy !== undefined && `device ${percent(use.busy)}`,
    use.memory_bytes && use.memory_total_bytes && `memory ${percent(use.memory_bytes / use.memory_total_bytes)}`,
    use.power_w && `${figure(use.power_w)} W`,
    use.temperature_c && `${figure(use.temperature_c)} °C`,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** The step as it passes: one row for each rank, all on the same clock. */
export function timeline(ranks, stragglers) {
  const whole = Math.max(...ranks.map((rank) => Math.max(total(rank), rank.planned_s ?? 0)), 1e-9);
  const tick = nice(whole / 4);
  const ticks = Array.from({ length: Math.floor(whole / tick) + 1 }, (_, index) => index * tick).filter(
    (at) => at < whole * 0.96,
  );
  const at = (seconds) => `${(100 * seconds) / whole}%`;
  const last = ranks.reduce((a, b) => (busy(b) > busy(a) ? b : a));
  const mates = ranks.filter((rank) => rank !== last && rank.group === last.group);
  const alone = mates.length > 0 && mates.every((rank) => busy(rank) < 0.8 * busy(last));
  return [
    h(
      "div",
      { class: "line" },
      h("h2", {}, "Step timeline"),
      legend(last.planned_s && h("span", { class: "key" }, h("i", { class: "planned" }), "planned end")),
    ),
    h(
      "p",
      { class: "soft" },
      `Rank ${last.rank} is busy longest, ${brief(busy(last))}${alone ? "; the others wait for it" : ""}.`,
    ),
    h(
      "div",
      { class: "lanes" },
      chosen(ranks, stragglers).map((rank) =>
        lane(
          rank,
          at,
          stragglers.some((each) => each.rank === rank.rank),
        ),
      ),
      h(
        "div",
        { class: "axis", "aria-hidden": "true", "data-key": "axis" },
        h("span", {}),
        h(
          "span",
          { class: "ticks" },
          ticks.map((each) => h("i", { style: { left: at(each) } }, brief(each).replace(/\.0+(?= )/, ""))),
        ),
      ),
    ),
    rest(ranks, stragglers),
  ];
}

function lane(rank, at, slow) {
  let begun = 0;
  const pieces = PARTS.map(([name, word, look]) => {
    const piece = h("i", {
      class: look,
      title: `${word}: ${brief(rank[name])}`,
      style: { left: at(begun), width: at(rank[name]) },
    });
    begun += rank[name];
    return piece;
  });
  const said = PARTS.map(([name, word]) => `${word} ${brief(rank[name])}`).join(", ");
  return h(
    "div",
    { class: `lane${slow ? " slow" : ""}`, "data-key": rank.rank },
    h("span", {}, rank.rank, slow && h("span", { class: "unseen" }, " (slow)")),
    h(
      "span",
      { class: "track", role: "img", "aria-label": `Rank ${rank.rank}: ${said}` },
      pieces,
      rank.planned_s &&
        h("b", { class: "planned", title: `planned: ${brief(rank.planned_s)}`, style: { left: at(rank.planned_s) } }),
    ),
  );
}

function legend(more) {
  return h(
    "span",
    { class: "legend" },
    PARTS.map(([, word, look]) => h("span", { class: "key" }, h("i", { class: look }), word)),
    more,
  );
}

/** Of many, those that are named and then the slowest. */
function chosen(ranks, stragglers) {
  if (all || ranks.length <= MOST) return ranks;
  const named = (rank) => stragglers.some((straggler) => straggler.rank === rank.rank);
  // In two digits: rows whose times differ by chance do not change places all the time.
  const slow = (rank) => Number(busy(rank).toPrecision(2));
  return ranks
    .toSorted((a, b) => named(b) - named(a) || slow(b) - slow(a) || a.rank - b.rank)
    .slice(0, MOST);
}

function rest(ranks, stragglers) {
  if (ranks.length <= MOST) return null;
  const first = stragglers.length ? "Stragglers and the slowest" : "The slowest";
  const turn = () => {
    all = !all;
    refresh();
  };
  return h(
    "p",
    { class: "soft line" },
    all ? `All ${count(ranks.length)} ranks.` : `${first}: ${MOST} of ${count(ranks.length)} ranks.`,
    h("button", { type: "button", class: "small", onclick: turn }, all ? `Show ${MOST}` : "Show all"),
  );
}

function total(rank) {
  return PARTS.reduce((sum, [name]) => sum + rank[name], 0);
}

/** 1, 2 or 5 times a power of ten. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const first = value / power;
  return power * (first < 1.5 ? 1 : first < 3.5 ? 2 : first < 7.5 ? 5 : 10);
}
