// The view of a job: progress, stragglers, reasons, output.

import { get } from "../lib/api.js";
import { checkpointsPart } from "../parts/checkpoints.js";
import { Curves } from "../parts/curves.js";
import { askCancel, askPriority, askRetry } from "../parts/dialog.js";
import { fill, h } from "../lib/dom.js";
import { asks, brief, count, figure, lasted, many, metric, ordinal, span, when } from "../lib/format.js";
import { firsts, groupsPart } from "../parts/groups.js";
import { Log } from "../parts/log.js";
import { planPart } from "../parts/plan.js";
import { bars, latest, steps as stepping, timeline, titleOf } from "../parts/ranks.js";
import { mayChange } from "../lib/session.js";
import { allocationOf, chip, ended, runs, waits } from "../lib/states.js";

const SELDOM_S = 10;
const MOST_EVENTS = 100;

export function jobView(number) {
  const head = h("div", { class: "head" }, h("h1", {}, `Job ${number}`));
  const reason = h("div");
  const alarms = h("div");
  const heard = h("div", { role: "alert", class: "unseen" });
  const figures = h("dl", { class: "figures" });
  const curves = new Curves();
  const groups = h("section", { class: "card", hidden: true, "aria-label": "Groups" });
  const ranks = h("section", { class: "card", hidden: true });
  const steps = h("section", { class: "card", hidden: true });
  const plan = h("section", { class: "card", hidden: true });
  const saved = h("section", { class: "card", hidden: true, "aria-label": "Checkpoints" });
  const events = h("section", { class: "card" });
  const facts = h("section", { class: "card" });
  const log = new Log(number);
  const element = h(
    "div",
    { class: "page job" },
    h("nav", { "aria-label": "Back" }, h("a", { href: "#/" }, "← All jobs")),
    head,
    reason,
    alarms,
    heard,
    figures,
    curves.element,
    groups,
    h("div", { class: "two" }, ranks, steps),
    plan,
    saved,
    log.element,
    h("div", { class: "two" }, events, facts),
  );
  const kept = { at: 0, is: "", plan: null, saved: [], stragglers: "" };

  async function refresh() {
    const job = await get(`/jobs/${number}`);
    const [live] = await Promise.all([
      runs(job) ? get(`/jobs/${number}/ranks`, { absent: NO_RANKS }) : NO_RANKS,
      curves.refresh(job),
      log.refresh(job),
      seldom(job),
    ]);
    const rows = live.ranks.length ? live.ranks : latest(job, curves.points);
    showHead(job);
    showStragglers(live.stragglers);
    show(groups, firsts(rows).length > 0, () => groupsPart(rows, runs(job)));
    show(ranks, rows.some(stepping), () => bars(rows, live.stragglers, runs(job)));
    show(steps, rows.length > 1 && rows.some(stepping), () => timeline(rows, live.stragglers));
    show(plan, kept.plan !== null, () => planPart(kept.plan, rows, job));
    show(saved, job.generation > 0, () => checkpointsPart(kept.saved, job));
    return ended(job) ? SELDOM_S : undefined;
  }

  /** Fetch what changes with the job's state, or slowly. */
  async function seldom(job) {
    const is = [job.state, job.generation, job.priority, job.reason, job.has_plan].join();
    if (is === kept.is && (ended(job) || Date.now() - kept.at < SELDOM_S * 1000)) return;
    Object.assign(kept, { is, at: Date.now() });
    const [stored, happened, checkpoints] = await Promise.all([
      job.has_plan ? get(`/jobs/${number}/plan`, { absent: null }) : null,
      get(`/jobs/${number}/events`),
      get(`/jobs/${number}/checkpoints`),
    ]);
    Object.assign(kept, { plan: stored?.content ?? null, saved: checkpoints });
    fill(events, eventsPart(job, happened));
    fill(facts, factsPart(job));
  }

  function showStragglers(stragglers) {
    const title = (straggler) => `${titleOf(straggler)}. `;
    fill(
      alarms,
      stragglers.map((straggler) => h("p", { class: "alarm" }, h("b", {}, title(straggler)), sentence(straggler.sentence))),
    );
    // Its numbers change all the time; screen readers announce it once.
    const who = stragglers.map((straggler) => `${title(straggler)} ${straggler.rank}`).join();
    if (who !== kept.stragglers)
      fill(heard, stragglers.map((straggler) => title(straggler) + sentence(straggler.sentence)).join(" "));
    kept.stragglers = who;
  }

  function showHead(job) {
    document.title = `${job.id} ${job.name}: ${job.state} · MiMatrix`;
    fill(
      head,
      h("h1", {}, h("span", { class: "id" }, job.id), " ", job.name),
      chip(job.state),
      mayChange(job) && actions(job),
    );
    fill(
      reason,
      job.reason &&
        job.reason !== job.state &&
        h(
          "p",
          { class: waits(job) ? "why" : "soft" },
          waits(job) && h("b", {}, "Waiting: "),
          sentence(job.reason),
        ),
    );
    fill(figures, figuresPart(job));
  }

  return { title: `Job ${number}`, element, refresh, leave: () => curves.leave() };
}

const NO_RANKS = { ranks: [], stragglers: [] };

function show(part, there, make) {
  part.hidden = !there;
  if (there) fill(part, make());
}

function sentence(said) {
  return said[0].toUpperCase() + said.slice(1) + (/[.!?]$/.test(said) ? "" : ".");
}

function actions(job) {
  const button = (word, ask, look = "") => h("button", { type: "button", class: look, onclick: () => ask(job) }, word);
  return h(
    "div",
    { class: "buttons" },
    ended(job)
      ? button("Requeue", askRetry)
      : [button("Priority", askPriority), button("Cancel", askCancel, "danger")],
  );
}

function figuresPart(job) {
  const { step, samples_per_s: rate, step_s: step_s, predicted_step_s: predicted, metrics } = job.progress;
  const seconds = lasted(job);
  const off = predicted && step_s ? step_s / predicted - 1 : null;
  const beside =
    predicted &&
    `predicted ${brief(predicted)}${off === null ? "" : `, ${off < 0 ? "−" : "+"}${Math.abs(off * 100).toFixed(0)} %`}`;
  const loss = Object.entries(metrics)[0];
  return [
    pair("Step", step > 0 && count(step), job.progress.epoch > 0 && `epoch ${count(job.progress.epoch)}`),
    pair("Samples/s", rate > 0 && figure(rate)),
    pair("Step time", step_s > 0 && brief(step_s), beside),
    loss && pair(loss[0], metric(loss[1])),
    pair("Devices", devicesOf(job), !waits(job) && nodesOf(allocationOf(job))),
    job.queue_position && pair("In queue", ordinal(job.queue_position)),
    waits(job) && [pair("Priority", String(job.priority)), pair("Submitted", when(job.created_at))],
    seconds !== null && !waits(job) && pair(job.ended_at ? "Took" : "Running for", span(seconds)),
  ];
}

function devicesOf(job) {
  if (job.allocation.length) return many(job.allocation.length, "device");
  if (!ended(job)) return `needs ${asks(job.devices)}`;
  return allocationOf(job).length ? `had ${many(allocationOf(job).length, "device")}` : `needed ${asks(job.devices)}`;
}

function nodesOf(devices) {
  const nodes = [...new Set(devices.map((device) => device.slice(0, device.lastIndexOf("/"))))];
  return nodes.length > 2 ? `on ${many(nodes.length, "node")}` : nodes.length ? `on ${nodes.join(" and ")}` : "";
}

function pair(word, value, more) {
  return value && h("div", { "data-key": word }, h("dt", {}, word), h("dd", {}, value, more && h("small", {}, more)));
}

function eventsPart(job, events) {
  const newest = events.slice(-MOST_EVENTS).reverse();
  return [
    h("h2", {}, "Events"),
    h(
      "ol",
      { class: "events", tabindex: "0", "aria-label": "Events, the newest first" },
      newest.map((event) =>
        h("li", { "data-key": event.id }, when(event.at), chip(event.state), h("span", {}, event.reason)),
      ),
    ),
    events.length > MOST_EVENTS &&
      h(
        "p",
        { class: "soft" },
        `The newest ${MOST_EVENTS} of ${count(events.length)}; all: `,
        h("code", {}, `mimatrix explain ${job.id}`),
      ),
  ];
}

function factsPart(job) {
  const fact = (word, value) => [h("dt", {}, word), h("dd", {}, value)];
  return [
    h("h2", {}, "Details"),
    h(
      "dl",
      { class: "facts" },
      fact("User", job.user),
      fact("Script", h("code", {}, [job.script, ...job.arguments].join(" "))),
      fact("Requested", asks(job.devices)),
      fact("Priority", job.priority),
      fact("Submitted", when(job.created_at)),
      job.started_at && fact("Started", when(job.started_at)),
      job.ended_at && fact("Ended", when(job.ended_at)),
      fact("Starts", count(job.generation)),
      job.exit_code !== null && fact("Exit code", job.exit_code),
      job.max_time_s && fact("Time limit", span(job.max_time_s)),
      fact("Preemptible", job.preemptible ? "yes" : "no"),
      allocationOf(job).length > 0 &&
        fact(
          job.allocation.length ? "Devices" : "Devices held",
          allocationOf(job).map((device) => [deviceLink(device), " "]),
        ),
    ),
  ];
}

export function deviceLink(device) {
  const at = device.lastIndexOf("/");
  return h("a", { href: `#/cluster/${encodeURIComponent(device.slice(0, at))}/${device.slice(at + 1)}` }, device);
}
