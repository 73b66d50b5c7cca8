// All jobs: who runs, who waits and why, who has ended; and how much of the cluster is in use.

import { get } from "../lib/api.js";
import { mayHandIn, who } from "../lib/session.js";
import { Chart } from "../parts/chart.js";
import { fill, h } from "../lib/dom.js";
import { asks, count, lasted, many, ordinal, span, when } from "../lib/format.js";
import { ENDED, RUNNING, WAITING, asked, chip, runs, waits } from "../lib/states.js";

const PAGE = 50;
const SEARCHED = 1000;
const SELDOM_S = 10;
// More jobs than this are asked for less often.
const MANY = 300;
const DAY_S = 86_400;
const LEAST_S = 300;
const TYPING_MS = 250;
const GROUPS = {
  "": "All states",
  running: "Running",
  waiting: "Waiting",
  done: "Done",
  failed: "Failed",
  cancelled: "Cancelled",
};
// What was looked for stays while other pages are seen.
const filter = { text: "", state: "", user: "" };
const shown = { running: PAGE, waiting: PAGE, ended: PAGE };

export function overview() {
  const use = useCard();
  const users = h("select", { id: "user", onchange: change });
  const states = h(
    "select",
    { id: "state", onchange: change },
    Object.entries(GROUPS).map(([value, word]) => h("option", { value }, word)),
  );
  const text = h("input", {
    id: "text",
    type: "search",
    placeholder: "Name, script or number",
    oninput: change,
    value: filter.text,
  });
  const lists = h("div", { class: "lists" }, h("p", { class: "soft" }, "Loading …"));
  const found = { live: [], ended: [], older: 0, at: 0, ids: "" };
  let typing;
  states.value = filter.state;

  const element = h(
    "div",
    { class: "page" },
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Jobs"),
      mayHandIn() && h("a", { class: "button main", href: "#/submit" }, "Submit a job"),
    ),
    use.element,
    h(
      "form",
      { class: "filters", role: "search", "aria-label": "Jobs", onsubmit: (event) => event.preventDefault() },
      labelled("Search", text),
      labelled("State", states),
      labelled("User", users),
    ),
    lists,
  );
  show();

  function change() {
    Object.assign(filter, { text: text.value, state: states.value, user: users.value });
    Object.assign(shown, { running: PAGE, waiting: PAGE, ended: PAGE });
    show();
    clearTimeout(typing);
    typing = setTimeout(() => refreshEnded().then(show, () => {}), TYPING_MS);
  }

  async function refresh() {
    const [live] = await Promise.all([get(`/jobs?limit=1000&${asked([...RUNNING, ...WAITING])}`), use.refresh()]);
    found.live = live.jobs;
    const ids = live.jobs.map((job) => job.id).join();
    if (ids !== found.ids || Date.now() - found.at > SELDOM_S * 1000) await refreshEnded();
    found.ids = ids;
    found.known = true;
    show();
    return live.jobs.length > MANY ? SELDOM_S : undefined;
  }

  async function refreshEnded() {
    const asking = (found.asking = {});
    found.at = Date.now();
    const wanted = ENDED.includes(filter.state) ? [filter.state] : ENDED;
    const most = filter.text ? SEARCHED : Math.min(SEARCHED, shown.ended);
    const user = filter.user ? `&user=${encodeURIComponent(filter.user)}` : "";
    const page = await get(`/jobs?limit=${most}&${asked(wanted)}${user}`);
    // An answer that was overtaken by that to a later question is of no use.
    if (found.asking === asking) Object.assign(found, { ended: page.jobs, older: page.more });
  }

  function show() {
    const names = new Set([...found.live, ...found.ended].map((job) => job.user).concat(filter.user || []));
    names.delete(who().user);
    fill(
      users,
      option("", "All users"),
      option(who().user, `${who().user} (you)`),
      [...names].sort().map((name) => option(name, name)),
    );
    users.value = filter.user;
    if (!found.known) return;
    const running = found.live.filter((job) => runs(job) && fits(job));
    const waiting = found.live
      .filter((job) => waits(job) && fits(job))
      .sort((a, b) => place(a) - place(b) || b.priority - a.priority || a.id - b.id);
    const ended = found.ended.filter(fits);
    const every = running.length + waiting.length + ended.length;
    fill(
      lists,
      !every && nothing(),
      group("running", "Running", running, running.length, every && !filter.state ? "No running jobs." : ""),
      group("waiting", "Waiting", waiting, waiting.length),
      group("ended", "Ended", ended, ended.length + (filter.text ? 0 : found.older)),
    );
  }

  function group(name, title, jobs, total, empty = "") {
    if (!jobs.length && !empty) return null;
    const rows = jobs.slice(0, shown[name]);
    const more = total - rows.length;
    return h(
      "section",
      { "data-key": name, "aria-labelledby": `of-${name}` },
      h("h2", { id: `of-${name}` }, title, " ", h("span", { class: "number" }, count(total))),
      jobs.length ? h("ul", { class: "jobs" }, rows.map(row)) : h("p", { class: "soft" }, empty),
      more > 0 && h("button", { type: "button", onclick: () => showMore(name) }, `Show more (${count(more)})`),
    );
  }

  async function showMore(name) {
    shown[name] += name === "ended" ? PAGE * 4 : PAGE * 2;
    if (name === "ended") await refreshEnded();
    show();
  }

  return { title: "Jobs", element, refresh, leave: use.leave };
}

function fits(job) {
  const { text, state, user } = filter;
  if (user && job.user !== user) return false;
  if (state === "running" ? !runs(job) : state === "waiting" ? !waits(job) : state && job.state !== state) return false;
  const said = `${job.id} ${job.name} ${job.script} ${job.user} ${job.reason}`.toLowerCase();
  return text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => said.includes(word));
}

/** Its position in the queue; a job that was just submitted comes last. */
const place = (job) => job.queue_position ?? Number.MAX_SAFE_INTEGER;

function row(job) {
  const { step, samples_per_s: rate } = job.progress;
  const seconds = lasted(job);
  const facts = [
    waits(job) && job.queue_position && h("b", {}, `${ordinal(job.queue_position)} in the queue`),
    job.user,
    runs(job) ? many(job.allocation.length, "device") : `${waits(job) ? "wants " : ""}${asks(job.devices)}`,
    runs(job) && step > 0 && `step ${count(step)}`,
    runs(job) && rate > 0 && `${count(rate)} samples/s`,
    waits(job) && `priority ${job.priority}`,
    seconds !== null && !waits(job) && (job.ended_at ? `took ${span(seconds)}` : `for ${span(seconds)}`),
  ].filter(Boolean);
  return h(
    "li",
    { "data-key": job.id },
    h("a", { class: "title", href: `#/jobs/${job.id}` }, h("span", { class: "id" }, job.id), " ", job.name),
    chip(job.state),
    h(
      "span",
      { class: "facts" },
      facts.map((fact) => h("span", {}, fact)),
    ),
    h("span", { class: "at" }, when(job.ended_at ?? job.created_at)),
    (waits(job) || job.state === "failed") && job.reason && h("span", { class: "reason" }, job.reason),
  );
}

function nothing() {
  if (filter.text || filter.state || filter.user)
    return h("p", { class: "empty", "data-key": "none" }, "No job matches the filter.");
  const command = h("code", {}, "mimatrix submit train.py");
  return h(
    "p",
    { class: "empty", "data-key": "none" },
    mayHandIn() ? ["No jobs yet. Submit one with “Submit a job”, or with ", command, "."] : "No jobs yet.",
  );
}

function option(value, word) {
  return h("option", { value, "data-key": `u-${value}` }, word);
}

function labelled(word, control) {
  return h("div", { class: "field" }, h("label", { for: control.id }, word), control);
}

/** Devices in use, now and over the day. */
function useCard() {
  const now = h("div", { class: "now" });
  const chart = new Chart({
    title: "Devices used, last 24 h",
    lines: [
      { label: "in use", colour: "--accent", filled: true, stepped: true },
      { label: "devices", colour: "--soft", dash: [4, 4], stepped: true },
      { label: "jobs waiting (right)", colour: "--wait", dash: [2, 4], stepped: true, apart: true },
    ],
    format: (value) => (Number.isInteger(value) ? count(value) : value.toFixed(1)),
    low: 0,
    span: (first, last) => [Math.max(last - DAY_S, Math.min(first, last - LEAST_S)), last],
    height: 130,
  });
  const element = h("section", { class: "card use", "aria-label": "Use of the cluster" }, now, chart.element);
  let at = 0;

  async function refresh() {
    const nodes = await get("/nodes");
    show(nodes);
    if (Date.now() - at < SELDOM_S * 1000) return;
    at = Date.now();
    const points = await get("/usage?hours=24", { absent: [] });
    chart.show(
      points.map((point) => new Date(point.at) / 1000),
      ...["used", "devices", "queued"].map((name) => points.map((point) => point[name])),
    );
    chart.element.hidden = !points.length;
  }

  function show(nodes) {
    const devices = nodes.filter((node) => node.answers).flatMap((node) => node.devices);
    const used = devices.filter((device) => device.job !== null).length;
    const silent = nodes.filter((node) => !node.answers).length;
    fill(
      now,
      h("p", { class: "big" }, h("b", {}, count(used)), ` of ${many(devices.length, "device")} in use`),
      h(
        "div",
        { class: "meter", role: "img", "aria-label": `${used} of ${devices.length} devices in use` },
        h("i", { style: { width: `${devices.length ? (100 * used) / devices.length : 0}%` } }),
      ),
      h(
        "p",
        { class: "soft" },
        many(nodes.length, "node"),
        silent > 0 && h("span", { class: "bad" }, `, ${count(silent)} ${silent === 1 ? "does" : "do"} not answer`),
        " · ",
        h("a", { href: "#/cluster" }, "Show the cluster"),
      ),
    );
  }

  return { element, refresh, leave: () => chart.leave() };
}
