// Curves that follow: metrics, samples a second, seconds a step.

import { get } from "../lib/api.js";
import { Chart } from "./chart.js";
import { fill, h } from "../lib/dom.js";
import { brief, figure, many, metric } from "../lib/format.js";
import { ended } from "../lib/states.js";

const MOST_METRICS = 8;
const WHOLE_S = 60;
const COLOURS = ["--accent", "--comm", "--load"];
// Whoever wanted to see all metrics wants so on the next page, too.
let all = false;

export class Curves {
  constructor() {
    this.points = [];
    this.charts = new Map();
    this.x = "step";
    this.at = 0;
    this.grid = h("div", { class: "charts" });
    this.more = h("p", { class: "soft line", hidden: true });
    const choice = (value, word) =>
      h(
        "label",
        {},
        h("input", { type: "radio", name: "x", value, checked: value === this.x, onchange: () => this.turn(value) }),
        h("span", {}, word),
      );
    this.element = h(
      "section",
      { class: "card", hidden: true, "aria-labelledby": "curves-title" },
      h(
        "div",
        { class: "line" },
        h("h2", { id: "curves-title" }, "Metrics"),
        h(
          "fieldset",
          { class: "switch" },
          h("legend", { class: "unseen" }, "Horizontal axis"),
          choice("step", "Steps"),
          choice("time", "Time"),
        ),
      ),
      this.grid,
      this.more,
    );
  }

  /** What is new; now and then all of it, since older points become coarser. */
  async refresh(job) {
    const whole = !this.points.length || Date.now() - this.at > WHOLE_S * 1000 || this.generation !== job.generation;
    if (!whole && ended(job) && this.state === job.state) return;
    if (!job.generation) return;
    const since = new Date(whole ? job.created_at : this.points.at(-1).at) / 1000;
    const path = `/jobs/${job.id}/history?points=300&ranks=last&since=${since}`;
    const found = await get(path, { absent: { points: [] } });
    if (whole) {
      this.at = Date.now();
      this.points = found.points;
    } else if (found.points.length) {
      const first = new Date(found.points[0].at);
      this.points = [...this.points.filter((point) => new Date(point.at) < first), ...found.points];
    }
    Object.assign(this, { state: job.state, generation: job.generation });
    this.show();
  }

  turn(x, every = all) {
    this.x = x;
    all = every;
    this.charts.forEach((chart) => chart.leave());
    this.charts.clear();
    this.grid.replaceChildren();
    this.show();
  }

  show() {
    const points = this.x === "step" ? forward(this.points) : this.points.filter(begun);
    this.element.hidden = points.length < 2;
    if (points.length < 2) return;
    const xs = points.map((point) => (this.x === "step" ? point.step : new Date(point.at) / 1000));
    const names = [...new Set(points.flatMap((point) => Object.keys(point.metrics)))];
    names.slice(0, all ? undefined : MOST_METRICS).forEach((name, index) =>
      this.chart(name, metric, COLOURS[index % 3]).show(
        xs,
        // Null is not finite; undefined was not told then, and the line goes on.
        points.map((point) => point.metrics[name]),
      ),
    );
    this.rest(names.length - MOST_METRICS);
    this.chart("Samples/s", figure, "--good", 0).show(
      xs,
      points.map(({ samples_per_s: rate }) => (rate === null ? undefined : rate || null)),
    );
    this.chart("Step time", brief, "--load", 0, true).show(
      xs,
      points.map(({ step_s: seconds }) => (seconds === null ? undefined : seconds || null)),
      points.map((point) => (point.step_s === null ? undefined : point.predicted_step_s)),
    );
  }

  rest(number) {
    this.more.hidden = number <= 0;
    fill(
      this.more,
      all ? "All metrics." : `And ${many(number, "more metric")}.`,
      h(
        "button",
        { type: "button", class: "small", onclick: () => this.turn(this.x, !all) },
        all ? `Show ${MOST_METRICS}` : "Show all",
      ),
    );
  }

  chart(title, format, colour, low = null, predicted = false) {
    if (!this.charts.has(title)) {
      const lines = [
        { label: "measured", colour },
        ...(predicted ? [{ label: "predicted", colour: "--soft", dash: [5, 4] }] : []),
      ];
      const chart = new Chart({ title, lines, format, x: this.x, low });
      // Metrics come first, even those that are told late.
      const later = title === "Step time" ? undefined : this.charts.get("Samples/s");
      this.grid.insertBefore(chart.element, later?.element ?? null);
      this.charts.set(title, chart);
    }
    return this.charts.get(title);
  }

  leave() {
    this.charts.forEach((chart) => chart.leave());
  }
}

/** Not before the first step, unless something was logged there. */
function begun(point) {
  return point.step > 0 || Object.keys(point.metrics).length > 0;
}

/**
 * Without what was done again later: after another start, steps begin at the last checkpoint. What was logged for a step
 * now and then, such as an evaluation, is a point without speeds: it becomes one with the other points of that step.
 */
function forward(points) {
  const kept = [];
  for (const point of points.toReversed().filter(begun)) {
    const later = kept.at(-1);
    if (!later || point.step < later.step) kept.push(point);
    else if (point.step === later.step) kept[kept.length - 1] = joined(point, later);
  }
  return kept.reverse();
}

function joined(point, later) {
  const speeds = later.samples_per_s === null ? point : later;
  return { ...speeds, at: later.at, metrics: { ...point.metrics, ...later.metrics } };
}
