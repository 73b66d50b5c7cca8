// One device: what it is, who has it, who had it.

import { get, now as serverNow } from "../lib/api.js";
import { Chart } from "../parts/chart.js";
import { fill, h } from "../lib/dom.js";
import { bytes, figure, percent, rate, span, when } from "../lib/format.js";
import { table } from "../parts/plan.js";
import { chip } from "../lib/states.js";

const HOUR_S = 3600;
const SELDOM_S = 10;

export function deviceView(node, number) {
  const name = `${node}/${number}`;
  const body = h("div", { class: "lists" }, h("p", { class: "soft" }, "Loading …"));
  const drawn = useCard(`/devices/${encodeURIComponent(node)}/${number}/usage?hours=24`);
  const past = h("div", { class: "lists" });
  const element = h(
    "div",
    { class: "page" },
    h("nav", { "aria-label": "Back" }, h("a", { href: "#/cluster" }, "← Cluster")),
    h("div", { class: "head" }, h("h1", {}, name)),
    body,
    drawn.element,
    past,
  );

  async function refresh() {
    const [nodes, history] = await Promise.all([
      get("/nodes"),
      get(`/devices/${encodeURIComponent(node)}/${number}`, { absent: { jobs: [] } }),
      drawn.refresh(),
    ]);
    const host = nodes.find((each) => each.name === node);
    const device = host?.devices.find((each) => each.name === name);
    fill(
      body,
      h(
        "p",
        {},
        device ? `${device.kind}, ${bytes(device.memory_bytes)}, ` : "It is not in the cluster now. ",
        device && now(host, device),
      ),
      device && h("p", { class: "soft" }, use(device)),
      history.jobs.length > 0 && day(history.jobs),
      !history.jobs.length && h("p", { class: "empty" }, "No job has used it yet."),
    );
    fill(past, history.jobs.length > 0 && users(history.jobs));
  }

  return { title: name, element, refresh, leave: drawn.leave };
}

/** How busy it was and what its memory held, over the day. */
function useCard(path) {
  const until = (first) => [first, serverNow() / 1000];
  const chart = (title, colour, more) =>
    new Chart({ title, lines: [{ label: title, colour }], low: 0, span: until, ...more });
  const charts = {
    busy: chart("Busy", "--accent", { format: share }),
    memory_bytes: chart("Memory", "--comm", { format: size, incrs: DOUBLINGS }),
  };
  const grid = h("div", { class: "charts" }, charts.busy.element, charts.memory_bytes.element);
  const title = h("h2", { id: "use" }, "Utilization");
  const element = h("section", { class: "card", hidden: true, "aria-labelledby": "use" }, title, grid);
  let at = 0;

  async function refresh() {
    if (Date.now() - at < SELDOM_S * 1000) return;
    at = Date.now();
    const points = await get(path, { absent: [] });
    const xs = points.map((point) => new Date(point.at) / 1000);
    const known = Object.keys(charts).filter((name) => points.some((point) => point[name] !== null));
    element.hidden = !known.length;
    for (const [name, chart] of Object.entries(charts)) {
      chart.element.hidden = !known.includes(name);
      chart.show(
        xs,
        points.map((point) => point[name]),
      );
    }
  }

  return { element, refresh, leave: () => Object.values(charts).forEach((chart) => chart.leave()) };
}

const DOUBLINGS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const share = (value) => (value === null ? "–" : percent(value));
const size = (value) => (value === null ? "–" : bytes(value));

function now(node, device) {
  if (!node.answers) return "on a node that does not answer.";
  return device.job === null
    ? "free."
    : ["used by ", h("a", { href: `#/jobs/${device.job}` }, `job ${device.job}`), "."];
}

function use(device) {
  const { busy, memory_bytes: taken, memory_total_bytes: whole, power_w: power, temperature_c: heat } = device.use ?? {};
  const there = (value) => value !== null && value !== undefined;
  const said = [
    there(busy) && `${percent(busy)} busy`,
    there(taken) && `memory ${bytes(taken)}${whole ? ` of ${bytes(whole)}` : ""}`,
    there(power) && `${figure(power)} W`,
    there(heat) && `${figure(heat)} °C`,
    there(device.moved_bytes_per_s) && `moves ${rate(device.moved_bytes_per_s)} to other devices`,
  ].filter(Boolean);
  return said.length ? said.join(" · ") : "No metrics: no worker runs here.";
}

/** The last day as a strip; less, where nobody used it before. */
function day(jobs) {
  const end = serverNow() / 1000;
  const first = Math.min(...jobs.map((job) => new Date(job.started_at) / 1000));
  const begin = Math.max(end - 24 * HOUR_S, Math.min(first, end - HOUR_S));
  const at = (seconds) => Math.max(0, (seconds - begin) / (end - begin)) * 100;
  const blocks = jobs
    .map((job) => ({
      job,
      from: at(new Date(job.started_at) / 1000),
      to: at(job.ended_at ? new Date(job.ended_at) / 1000 : end),
    }))
    .filter(({ to }) => to > 0);
  const used = blocks.reduce((sum, { from, to }) => sum + to - from, 0);
  return h(
    "section",
    { class: "card", "aria-labelledby": "day" },
    h("h2", { id: "day" }, "In use"),
    h(
      "div",
      { class: "strip", role: "img", "aria-label": `In use for ${Math.round(used)} % of the time` },
      blocks.map(({ job, from, to }) =>
        h("i", {
          "data-key": `${job.id}-${job.started_at}`,
          title: `${job.id} ${job.name}`,
          style: { left: `${from}%`, width: `${Math.max(0.3, to - from)}%` },
        }),
      ),
    ),
    h("p", { class: "soft ends" }, when(new Date(begin * 1000).toISOString()), h("span", {}, "now")),
  );
}

function users(jobs) {
  return h(
    "section",
    { class: "card", "aria-labelledby": "users" },
    h("h2", { id: "users" }, "Jobs on this device"),
    table(
      ["Job", "User", "State", "From", "For"],
      jobs.map((job) => [
        h("a", { href: `#/jobs/${job.id}` }, `${job.id} ${job.name}`),
        job.user,
        chip(job.state),
        when(job.started_at),
        span((new Date(job.ended_at ?? serverNow()) - new Date(job.started_at)) / 1000),
      ]),
    ),
  );
}
