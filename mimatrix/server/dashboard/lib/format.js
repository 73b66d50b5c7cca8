// Numbers, times and sizes as people read them.

import { now } from "./api.js";
import { h } from "./dom.js";

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const order = new Intl.PluralRules("en", { type: "ordinal" });
const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });

/** 1,234 */
export const count = (value) => plain.format(value);

/** Three or four digits, whatever the size: 0.0123, 12.3, 12,345, 1.23e+12. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1000) return plain.format(value);
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(2);
  return value
    .toPrecision(size < 1 ? 3 : 4)
    .replace(/(\.\d*?)0+$/, "$1")
    .replace(/\.$/, "");
}

/** What `run.log` was given; what is not finite comes as null. */
export const metric = (value) => (value === null ? "nan" : figure(value));

/** Of a step: 12.3 ms, 1.24 s. */
export function brief(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds === 0) return "0 ms";
  const ms = seconds * 1000;
  return `${ms.toFixed(ms < 1 ? 2 : ms < 100 ? 1 : 0)} ms`;
}

/** Of a job: 42 s, 12 min, 3 h 20 min, 2 d 4 h. */
export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return minutes < 10 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** 512 MiB, 79.6 GiB */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let left = value;
  let at = 0;
  for (; left >= 1024 && at < units.length - 1; at += 1) left /= 1024;
  return `${left.toFixed(left < 10 && at ? 1 : 0)} ${units[at]}`;
}

/** 850 kB/s, 2.1 MB/s, 1.25 GB/s: in thousands, as links are sold. */
export function rate(bytes_per_s) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let left = bytes_per_s;
  let at = 0;
  for (; left >= 999.5 && at < units.length - 1; at += 1) left /= 1000;
  return `${at && left < 99.5 ? left.toPrecision(at > 2 ? 3 : 2) : left.toFixed(0)} ${units[at]}/s`;
}

/** 1st, 22nd, 113th */
export function ordinal(number) {
  const ending = { one: "st", two: "nd", few: "rd", other: "th" }[order.select(number)];
  return count(number) + ending;
}

/** 42 % */
export const percent = (part) => `${Math.round(part * 100)} %`;

/** 3 jobs, 1 job */
export const many = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** What a job asked for: 2 devices, or a100:2. */
export const asks = (devices) => (/^\d+$/.test(devices) ? many(Number(devices), "device") : devices);

/** When, in the zone of whoever looks; the exact time when it is pointed at. */
export function when(text) {
  const at = new Date(text);
  const today = new Date(now()).toDateString() === at.toDateString();
  const said = today ? clock.format(at) : `${day.format(at)}, ${clock.format(at)}`;
  return h("time", { datetime: text, title: exact.format(at) }, said);
}

/** How long ago. */
export function ago(text) {
  const seconds = (now() - new Date(text)) / 1000;
  const said = seconds < 5 ? "just now" : `${span(seconds)} ago`;
  return h("time", { datetime: text, title: exact.format(new Date(text)) }, said);
}

/** How long a job has run, or ran. */
export function lasted(job) {
  if (!job.started_at) return null;
  return (new Date(job.ended_at ?? now()) - new Date(job.started_at)) / 1000;
}
