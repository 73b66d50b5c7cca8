// Lines over time or steps, drawn by uPlot in the colours of the page.

import { fill, h } from "../lib/dom.js";
import uPlot from "../vendor/uplot/uPlot.esm.js";

const HEIGHT = 170;
const dark = matchMedia("(prefers-color-scheme: dark)");

/**
 * One chart: `lines` are [{label, colour, dash, filled, stepped, apart}], the first of which is shown in figures; a line
 * that is `apart` has an axis of its own on the right. Lines have a gap at null, and go on over undefined.
 * `low` is where the upright axis begins, `incrs` how far apart its figures may be, `span(first, last)` from where to
 * where the other one goes.
 */
export class Chart {
  constructor({ title, lines, format, x = "time", low = null, span = null, incrs, height = HEIGHT }) {
    Object.assign(this, { title, lines, format, x, low, span, incrs, height });
    this.data = [[], ...lines.map(() => [])];
    this.value = h("span", { class: "figure" });
    this.place = h("div", { class: "plot", role: "img" });
    this.keys = lines.map((line) =>
      h("span", { class: `key ${line.dash ? "dashed" : ""}`, style: { "--c": `var(${line.colour})` } }, line.label),
    );
    const legend = lines.length > 1 && h("span", { class: "legend" }, this.keys);
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("span", { class: "name" }, title), this.value, legend),
      this.place,
    );
    this.sized = new ResizeObserver(() => this.fit());
    this.sized.observe(this.place);
    this.painted = () => this.draw();
    dark.addEventListener("change", this.painted);
  }

  /** Show `xs` (seconds since 1970, or steps) against a list for each line. */
  show(xs, ...ys) {
    const other =
      xs.length !== this.data[0].length || xs.at(-1) !== this.data[0].at(-1) || ys[0].at(-1) !== this.data[1].at(-1);
    this.data = [xs, ...ys];
    if (this.plot && other) this.plot.setData(this.data);
    else if (!this.plot && xs.length) this.draw();
    this.keys.forEach((key, at) => (key.hidden = ys[at].every((value) => (value ?? null) === null)));
    this.tell(xs.length - 1);
  }

  leave() {
    this.sized.disconnect();
    dark.removeEventListener("change", this.painted);
    this.plot?.destroy();
  }

  fit() {
    const width = this.place.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
    else if (!this.plot && this.data[0].length) this.draw();
  }

  tell(at) {
    const told = this.data[1].filter((value) => value !== undefined);
    const first = told.find((value) => value !== null) ?? null;
    // What was told last, be it not finite: an older value is not that of now.
    const shown = this.data[1].slice(0, at + 1).findLast((value) => value !== undefined);
    fill(this.value, shown === undefined ? "" : this.format(shown));
    const said = told.length ? `from ${this.format(first)} to ${this.format(told.at(-1))}` : "nothing yet";
    this.place.setAttribute("aria-label", `${this.title}: ${said}`);
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.place.clientWidth;
    if (!width || !this.data[0].length) return;
    const colours = getComputedStyle(this.place);
    const colour = (name) => colours.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const values = (_, splits) =>
      splits.map((value) => (value === null ? "" : this.format(value).replace(/\.0+(?= )/, "")));
    const apart = this.lines.findIndex((line) => line.apart);
    const onRight = (_, splits) => (this.data[apart + 1].some(Boolean) ? values(_, splits) : splits.map(() => ""));
    this.plot = new uPlot(
      {
        width,
        height: this.height,
        legend: { show: false },
        padding: [8, 8, 0, 0],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: {
          x: { time: this.x === "time", ...(this.span ? { range: (_, first, last) => this.span(first, last) } : {}) },
          y: { range: (_, low, high) => this.range(low, high) },
          ...(apart < 0 ? {} : { apart: { range: (_, low, high) => this.range(low, high) } }),
        },
        axes: [
          { ...axis, grid: { show: false }, space: 70, size: 26, ...(this.x === "time" ? { values: CLOCK } : {}) },
          { ...axis, values, incrs: this.incrs, space: 32, size: 58 },
          ...(apart < 0
            ? []
            : [
                {
                  ...axis,
                  stroke: colour(this.lines[apart].colour),
                  scale: "apart",
                  side: 1,
                  grid: { show: false },
                  values: onRight,
                  space: 32,
                  size: (_, said) => (said?.some(Boolean) ? 40 : 8),
                },
              ]),
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            scale: line.apart ? "apart" : "y",
            stroke: colour(line.colour),
            width: 1.75,
            dash: line.dash,
            fill: line.filled ? colour("--fill") : undefined,
            paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
            points: { show: false, size: 6, fill: colour(line.colour), filter: alone },
            spanGaps: false,
          })),
        ],
        hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx ?? this.data[0].length - 1)] },
      },
      this.data,
      this.place,
    );
  }

  range(low, high) {
    if (low === null) return [0, 1];
    const least = this.low ?? low - (high - low) * 0.08;
    const most = high + (high - least || Math.abs(high) || 1) * 0.08;
    return [Math.min(least, low), most];
  }
}

/** Points that no line leads to. */
function alone(plot, line) {
  const ys = plot.data[line];
  const told = ys.map((_, at) => at).filter((at) => ys[at] !== undefined);
  const empty = (place) => (ys[told[place]] ?? null) === null;
  const found = told.filter((_, place) => !empty(place) && empty(place - 1) && empty(place + 1));
  return found.length ? found : null;
}

const two = (number) => String(number).padStart(2, "0");

function CLOCK(plot, splits) {
  const [low, high] = [plot.scales.x.min, plot.scales.x.max];
  return splits.map((seconds) => {
    const at = new Date(seconds * 1000);
    const said = `${two(at.getHours())}:${two(at.getMinutes())}`;
    return high - low < 300 ? `${said}:${two(at.getSeconds())}` : said;
  });
}
