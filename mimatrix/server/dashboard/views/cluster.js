// The machines: what hangs at which switch, what their links carry, who uses which device and how much.

import { get } from "../lib/api.js";
import { fill, h, staying } from "../lib/dom.js";
import { ago, bytes, count, many, percent, rate } from "../lib/format.js";
import { link, scale } from "../parts/links.js";
import { RUNNING, asked } from "../lib/states.js";

// More devices than this are asked for less often, and on a phone folded away at first.
const MANY = 200;
const SELDOM_S = 5;
// So many of a node have room for their words.
const FEW = 4;
const narrow = matchMedia("(max-width: 48rem)");

export function clusterView() {
  const body = h("div", { class: "lists" }, h("p", { class: "soft" }, "Loading …"));
  const element = h("div", { class: "page" }, h("div", { class: "head" }, h("h1", {}, "Cluster"), legend()), body);
  // There may be hundreds of nodes: those of which nothing has changed are not made again.
  let drawn = new Map();

  async function refresh() {
    const [nodes, live] = await Promise.all([get("/nodes"), get(`/jobs?limit=1000&${asked(RUNNING)}`)]);
    const jobs = new Map(live.jobs.map((job) => [job.id, job]));
    const before = drawn;
    drawn = new Map(nodes.map((node) => [node.name, shown(node, jobs)]));
    const show = (node) =>
      drawn.get(node.name) === before.get(node.name) ? staying("li", node.name) : spot(node, jobs);
    const all = nodes.reduce((sum, node) => sum + node.devices.length, 0);
    const opened = all <= MANY || !narrow.matches;
    fill(body, nodes.length ? places(nodes).map(([rack, inside]) => place(rack, inside, opened, show)) : noNodes());
    return all > MANY ? SELDOM_S : undefined;
  }

  return { title: "Cluster", element, refresh };
}

/** All that is shown of a node. */
function shown(node, jobs) {
  return JSON.stringify([
    node.answers ? null : Math.floor(Date.now() / 1000),
    { ...node, seen_at: null },
    node.devices.map((device) => jobs.get(device.job)?.name),
  ]);
}

function legend() {
  const words = { used: "in use", free: "free", silent: "does not answer" };
  return h(
    "span",
    { class: "legend" },
    Object.entries(words).map(([look, word]) => h("span", { class: "key" }, h("i", { class: look }), word)),
    h("span", { class: "key" }, h("span", { class: "meter" }, h("i")), "busy, and what it moves to others"),
    scale(),
  );
}

function noNodes() {
  return h("p", { class: "empty" }, "No nodes yet. This machine is added by ", h("code", {}, "mimatrix up"), ".");
}

/** Nodes that are close to one another hang at the same switch. */
function places(nodes) {
  const found = new Map();
  for (const node of nodes) found.set(node.rack, [...(found.get(node.rack) ?? []), node]);
  return [...found].sort(([a], [b]) => a.localeCompare(b));
}

function place(rack, nodes, opened, show) {
  const devices = nodes.flatMap((node) => (node.answers ? node.devices : []));
  const free = devices.filter((device) => device.job === null).length;
  const silent = nodes.filter((node) => !node.answers).length;
  const known = nodes.filter((node) => node.traffic);
  const sum = (name) => rate(known.reduce((total, node) => total + node.traffic[name], 0));
  return h(
    "section",
    { class: "place", "data-key": `rack-${rack}`, "aria-label": rack || "Nodes" },
    h(
      "details",
      { open: opened },
      h(
        "summary",
        { class: "switchboard" },
        h("h2", {}, rack || "Nodes"),
        h("span", {}, `${count(free)} of ${many(devices.length, "device")} free`),
        silent > 0 && h("span", { class: "bad" }, `${many(silent, "node")} ${silent === 1 ? "does" : "do"} not answer`),
        h(
          "span",
          { class: "sum" },
          known.length > 1 && `${sum("received_bytes_per_s")} to nodes, ${sum("sent_bytes_per_s")} from them`,
        ),
      ),
      h("ul", { class: "nodes" }, nodes.map(show)),
    ),
  );
}

function spot(node, jobs) {
  const kinds = Map.groupBy(node.devices, kind);
  const inside = [...kinds].map(([name, alike]) => `${alike.length} × ${name}`);
  return h(
    "li",
    { class: "spot", "data-key": node.name },
    link(node),
    h(
      "article",
      { class: `card node${node.answers ? "" : " silent"}`, "aria-label": `Node ${node.name}` },
      h(
        "div",
        { class: "line" },
        h("h3", {}, node.name),
        h("span", { class: "soft" }, [inside.join(", "), node.address].filter(Boolean).join(" · ")),
      ),
      !node.answers && h("p", { class: "bad" }, "Does not answer; last seen ", ago(node.seen_at), "."),
      h(
        "ul",
        { class: `devices ${node.devices.length > FEW ? "" : "few"}` },
        node.devices.map((device) => tile(node, device, jobs.get(device.job), kinds.size > 1)),
      ),
    ),
  );
}

const kind = (device) => `${device.kind} ${bytes(device.memory_bytes)}`;

function tile(node, device, job, odd) {
  const number = device.name.slice(device.name.lastIndexOf("/") + 1);
  const look = !node.answers ? "silent" : device.job === null ? "free" : "used";
  return h(
    "li",
    { class: `device ${look}`, "data-key": device.name },
    h(
      "a",
      { href: `#/cluster/${encodeURIComponent(node.name)}/${number}`, "aria-label": `Device ${device.name}` },
      number,
    ),
    device.job === null
      ? h("span", { class: "user" }, node.answers ? "free" : "unknown")
      : h(
          "span",
          { class: "user" },
          h("a", { href: `#/jobs/${device.job}`, title: job && `${job.name} of ${job.user}` }, device.job, " ", job?.name),
          job && h("span", { class: "soft" }, " ", job.user),
        ),
    odd && h("span", { class: "kind", title: kind(device) }, device.kind),
    node.answers && activity(device),
  );
}

/** How busy it is, and what it moves to others; of the same height where nobody tells. */
function activity(device) {
  const busy = device.use?.busy ?? null;
  const moved = device.moved_bytes_per_s;
  const said = [busy !== null && `${percent(busy)} busy`, moved !== null && `moves ${rate(moved)}`].filter(Boolean);
  return h(
    "span",
    { class: "activity" },
    h(
      "span",
      { class: `meter ${busy === null ? "unknown" : ""}`, role: "img", "aria-label": said.join(", ") || "no figures" },
      busy !== null && h("i", { style: { width: `${100 * busy}%` } }),
    ),
    h(
      "span",
      { class: "told", "aria-hidden": "true", title: said.join(", ") },
      h("span", {}, busy === null ? "–" : [percent(busy), h("span", { class: "word" }, " busy")]),
      moved !== null && h("span", {}, h("span", { class: "word moves" }, "moves "), rate(moved)),
    ),
  );
}
