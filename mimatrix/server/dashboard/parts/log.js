// The output of a rank, followed as it is written.

import { get } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { refresh } from "../lib/session.js";
import { allocationOf, ended } from "../lib/states.js";

const MOST_CHARACTERS = 400_000;
/** Where reading starts, counted from the end, so that long output appears as quickly as short output. */
const END_BYTES = 65_536;
/** How many pieces one refresh reads at most. */
const PIECES = 16;
/** Terminal escape sequences; the second matches an incomplete one at the end. */
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[@-Z\\^_])/g;
const HALF_ESCAPE = /\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b\n]*|[ -/]+)?$/;

export class Log {
  constructor(number) {
    this.number = number;
    this.rank = h("select", { id: "log-rank", onchange: () => this.choose() });
    this.start = h("select", { id: "log-start", onchange: () => this.restart() });
    this.starts = h("div", { class: "field", hidden: true }, h("label", { for: "log-start" }, "Start"), this.start);
    this.pause = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.turn() }, "Pause");
    this.text = h("pre", { tabindex: "0", role: "region", "aria-label": "Output" });
    this.note = h("p", { class: "soft" });
    this.element = h(
      "section",
      { class: "card log", "aria-labelledby": "log-title" },
      h(
        "div",
        { class: "line" },
        h("h2", { id: "log-title" }, "Output"),
        (this.tools = h(
          "div",
          { class: "tools" },
          this.starts,
          h("div", { class: "field" }, h("label", { for: "log-rank" }, "Rank"), this.rank),
          this.pause,
        )),
      ),
      this.note,
      this.text,
    );
    this.generation = 0;
    this.forget();
  }

  forget() {
    this.offset = -END_BYTES;
    this.line = "";
    this.last = new Text();
    this.text.replaceChildren(this.last);
    this.cut = this.over = false;
    this.shown = this.wanted();
    // An answer to what was asked before is of no use.
    this.asking = null;
  }

  /** The rank and the start that are selected. */
  wanted() {
    return `${this.rank.value} ${this.start.value}`;
  }

  choose() {
    this.chosen = true;
    this.restart();
  }

  restart() {
    this.forget();
    refresh();
  }

  turn() {
    this.paused = !this.paused;
    this.pause.setAttribute("aria-pressed", String(this.paused));
    fill(this.pause, this.paused ? "Resume" : "Pause");
    if (!this.paused) refresh();
  }

  async refresh(job) {
    this.choices(job);
    this.tools.hidden = !job.generation;
    if (!job.generation || this.paused || (this.over && ended(job))) return this.tell(job);
    const asking = (this.asking = {});
    for (let piece = 0; piece < PIECES; piece += 1) {
      const path = `/jobs/${this.number}/log?rank=${this.rank.value}&generation=${this.start.value}&offset=${this.offset}`;
      const found = await get(path, { absent: { text: "", next_offset: this.offset, has_ended: false } });
      if (this.asking !== asking) return undefined;
      const begins = this.offset < 0;
      this.offset = found.next_offset;
      if (!found.text) {
        this.over = found.has_ended;
        break;
      }
      this.add(begins ? this.begun(found) : found.text);
    }
    return this.tell(job);
  }

  /** Without the half line that it may begin with. */
  begun({ text, next_offset: end }) {
    this.cut = end > END_BYTES || end > new TextEncoder().encode(text).length;
    return this.cut ? text.slice(text.indexOf("\n") + 1) : text;
  }

  /** Append text; scrolled to the end it stays there. */
  add(text) {
    const follows = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    const lines = (this.line + text).replace(ESCAPES, "").split("\n");
    this.line = afterReturns(lines.pop());
    const whole = lines.map((line) => `${written(line)}\n`).join("");
    if (whole) this.text.insertBefore(new Text(whole), this.last);
    this.last.data = written(this.line).replace(HALF_ESCAPE, "");
    if (this.text.textContent.length > MOST_CHARACTERS) this.shorten();
    if (follows) this.text.scrollTop = this.text.scrollHeight;
  }

  shorten() {
    const kept = this.text.textContent.slice(-MOST_CHARACTERS / 2, -this.last.length || undefined);
    this.text.replaceChildren(new Text(kept.slice(kept.indexOf("\n") + 1)), this.last);
    this.cut = true;
  }

  choices(job) {
    const ranks = Math.max(1, allocationOf(job).length);
    fill(
      this.rank,
      Array.from({ length: ranks }, (_, rank) => h("option", { value: rank, "data-key": `r${rank}` }, rank)),
    );
    if (job.generation !== this.generation) {
      this.generation = job.generation;
      fill(
        this.start,
        Array.from({ length: job.generation }, (_, at) =>
          h("option", { value: at + 1, "data-key": `s${at}` }, `${at + 1}`),
        ),
      );
      this.start.value = job.generation;
    }
    this.starts.hidden = job.generation < 2;
    const failed = job.failed_rank ?? null;
    if (!this.chosen && failed !== null && failed < ranks) this.rank.value = failed;
    if (this.wanted() !== this.shown) this.forget();
  }

  tell(job) {
    const empty = !this.text.textContent;
    const command = h("code", {}, `mimatrix logs ${job.id} --rank ${this.rank.value}`);
    this.text.hidden = empty;
    this.pause.hidden = this.over && ended(job);
    fill(
      this.note,
      empty
        ? job.generation
          ? `No output${ended(job) ? "" : " yet"}.`
          : "Not started yet."
        : this.cut
          ? ["Only the end is shown. For all output: ", command]
          : "",
    );
    this.note.hidden = !empty && !this.cut;
  }
}

/** A line as a terminal shows it in the end: a progress bar is written over itself again and again. */
const written = (line) => afterReturns(line).replace(/\r+$/, "");

/** What follows the last return but those at the end, over which nothing was written yet. */
function afterReturns(line) {
  const end = line.replace(/\r+$/, "").length;
  return line.slice(line.slice(0, end).lastIndexOf("\r") + 1);
}

