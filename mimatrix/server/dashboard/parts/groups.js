// Groups that train asynchronously: pushes, staleness and waiting.

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
      `${many(pushing.length, "group")}, training asynchronously. `,
      "Staleness: pushes of other groups since the last pull. Pushing, waiting: total time that training stood still ",
      "for its own pushes, and for other groups.",
    ),
    table(
      ["Group", "Ranks", "Pushes", "Samples", "Share", ...(live ? ["Samples/s"] : []), "Staleness", "Pushing", "Waiting"],
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
