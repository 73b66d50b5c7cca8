// The machines: who uses which device, what is free, who does not answer.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { ago, bytes, count, many } from "./format.js";
import { RUNNING, asked } from "./states.js";

export function clusterView() {
  const body = h("div", { class: "lists" }, h("p", { class: "soft" }, "Loading …"));
  const element = h("div", { class: "page" }, h("div", { class: "head" }, h("h1", {}, "Cluster"), legend()), body);
  let was = "";

  async function refresh() {
    const [nodes, live] = await Promise.all([get("/nodes"), get(`/jobs?most=1000&${asked(RUNNING)}`)]);
    const is = JSON.stringify([
      nodes.map((node) => [node.name, node.answers, node.devices]),
      live.jobs.map((job) => job.name),
    ]);
    if (is === was && nodes.every((node) => node.answers)) return;
    was = is;
    const jobs = new Map(live.jobs.map((job) => [job.id, job]));
    fill(
      body,
      nodes.length
        ? places(nodes).map(([near, inside]) => place(near, inside, jobs))
        : h(
            "p",
            { class: "empty" },
            "No nodes yet. On this machine they come with ",
            h("code", {}, "mimatrix up"),
            ".",
          ),
    );
  }

  return { title: "Cluster", element, refresh };
}

function legend() {
  return h(
    "span",
    { class: "legend" },
    ["used", "free", "silent"].map((look) =>
      h(
        "span",
        { class: "key" },
        h("i", { class: look }),
        look === "used" ? "in use" : look === "silent" ? "does not answer" : look,
      ),
    ),
  );
}

/** Nodes that are close to one another stand together. */
function places(nodes) {
  const found = new Map();
  for (const node of nodes) found.set(node.near, [...(found.get(node.near) ?? []), node]);
  return [...found].sort(([a], [b]) => a.localeCompare(b));
}

function place(near, nodes, jobs) {
  const devices = nodes.flatMap((node) => (node.answers ? node.devices : []));
  const free = devices.filter((device) => device.job === null).length;
  return h(
    "section",
    { "data-key": `near-${near}`, "aria-label": near || "Nodes" },
    h(
      "h2",
      {},
      near || "Nodes",
      " ",
      h("span", { class: "number" }, `${count(free)} of ${many(devices.length, "device")} free`),
    ),
    h(
      "div",
      { class: "nodes" },
      nodes.map((node) => card(node, jobs)),
    ),
  );
}

function card(node, jobs) {
  return h(
    "article",
    { class: `card node${node.answers ? "" : " silent"}`, "data-key": node.name, "aria-label": `Node ${node.name}` },
    h("div", { class: "line" }, h("h3", {}, node.name), h("span", { class: "soft" }, node.address)),
    !node.answers && h("p", { class: "bad" }, "Does not answer; last seen ", ago(node.seen_at), "."),
    h(
      "ul",
      { class: "devices" },
      node.devices.map((device) => tile(node, device, jobs.get(device.job))),
    ),
  );
}

function tile(node, device, job) {
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
    h("span", { class: "kind" }, device.kind, " ", h("span", { class: "soft" }, bytes(device.memory_bytes))),
    device.job === null
      ? h("span", { class: "user" }, node.answers ? "free" : "unknown")
      : h(
          "span",
          { class: "user" },
          h("a", { href: `#/jobs/${device.job}` }, `${device.job} ${job?.name ?? ""}`),
          job && ` ${job.user}`,
        ),
  );
}
