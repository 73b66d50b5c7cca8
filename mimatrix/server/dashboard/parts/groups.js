// Groups that do not wait for each other: what each has pushed, and how late it came.

import { h } from "../lib/dom.js";
import { brief, count, figure, many, percent, span } from "../lib/format.js";
import { table } from "./plan.js";

/** Ranks that push for their groups; none where all ranks step together. */
export const firsts = (ranks) => ranks.filter((rank) => rank.pushed);

const lasted = (seconds) => (seconds < 60 ? brief(seconds) : span(seconds));

/** A row for each group. */
export function groupsPart(ranks, live) {
  const pushing = firsts(ranks);
  const whole = Math.max(1, pushing.reduce((sum, rank) => sum + rank.pushed.samples, 0));
  return [
    h("h2", {}, "Groups"),
    h(
      "p",
      { class: "soft" },
      `${many(pushing.length, "group")} that ${live ? "do" : "did"} not wait for each other. `,
      "Late: pushes of others that the last one did not know. Pushing, waiting: what it stood still for its pushes, and ",
      "for others, in all.",
    ),
    table(
      ["Group", "Ranks", "Pushes", "Samples", "Of all", ...(live ? ["Samples/s"] : []), "Late", "Pushing", "Waiting"],
      pushing.map((rank) => [
        count(rank.group),
        ranks
          .filter((each) => each.group === rank.group)
          .map((each) => each.rank)
          .join(", "),
        count(rank.pushed.pushes),
        count(rank.pushed.samples),
        percent(rank.pushed.samples / whole),
        ...(live ? [figure(rank.samples_per_s)] : []),
        figure(rank.pushed.staleness),
        lasted(rank.pushed.moved_s),
        lasted(rank.pushed.waited_s),
      ]),
      "groups",
    ),
  ];
}
