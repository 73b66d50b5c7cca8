// The output of a rank, as it is written.

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { refresh } from "./session.js";
import { ended } from "./states.js";

const MOST_CHARACTERS = 400_000;
/** It begins so far from the end: a long one is there as soon as a short one. */
const END_BYTES = 65_536;
/** Pieces that are read at once, until the end is reached. */
const PIECES = 16;

export class Log {
  constructor(number) {
    this.number = number;
    this.rank = h("select", { id: "log-rank", onchange: () => this.restart() });
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
    this.text.textContent = "";
    this.cut = this.over = false;
  }

  restart() {
    this.forget();
    refresh();
  }

  turn() {
    this.paused = !this.paused;
    this.pause.setAttribute("aria-pressed", String(this.paused));
    fill(this.pause, this.paused ? "Go on" : "Pause");
    if (!this.paused) refresh();
  }

  async refresh(job) {
    this.choices(job);
    this.tools.hidden = !job.generation;
    this.pause.hidden = this.over && ended(job);
    if (!job.generation || this.paused || (this.over && ended(job))) return this.tell(job);
    const asked = [this.rank.value, this.start.value];
    for (let piece = 0; piece < PIECES; piece += 1) {
      const path = `/jobs/${this.number}/log?rank=${this.rank.value}&generation=${this.start.value}&offset=${this.offset}`;
      const found = await get(path, { absent: { text: "", next_offset: this.offset, has_ended: false } });
      if (asked.join() !== [this.rank.value, this.start.value].join()) return undefined;
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

  /** At the end it follows; whoever scrolled up stays there. */
  add(text) {
    const follows = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    this.text.append(text);
    if (this.text.textContent.length > MOST_CHARACTERS) {
      const kept = this.text.textContent.slice(-MOST_CHARACTERS / 2);
      this.text.textContent = kept.slice(kept.indexOf("\n") + 1);
      this.cut = true;
    }
    if (follows) this.text.scrollTop = this.text.scrollHeight;
  }

  choices(job) {
    const ranks = Math.max(1, job.seats.length);
    fill(
      this.rank,
      Array.from({ length: ranks }, (_, rank) => h("option", { value: rank, "data-key": `r${rank}` }, rank)),
    );
    if (job.generation !== this.generation) {
      this.generation = job.generation;
      fill(
        this.start,
        Array.from({ length: job.generation }, (_, at) =>
          h("option", { value: at + 1, "data-key": `s${at}` }, `${at + 1}.`),
        ),
      );
      this.start.value = job.generation;
      this.forget();
    }
    this.starts.hidden = job.generation < 2;
  }

  tell(job) {
    const empty = !this.text.textContent;
    const command = h("code", {}, `mimatrix logs ${job.id} --rank ${this.rank.value}`);
    this.text.hidden = empty;
    fill(
      this.note,
      empty
        ? job.generation
          ? "It has said nothing yet."
          : "It has not started yet."
        : this.cut
          ? ["The end of it; all of it: ", command]
          : "",
    );
    this.note.hidden = !empty && !this.cut;
  }
}
