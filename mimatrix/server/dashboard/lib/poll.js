// Asks again and again: every two seconds, not at all while nobody looks, and ever later while nobody answers.

import { Away } from "./api.js";

export const EVERY_S = 2;
const LONGEST_S = 30;

/** Calls `work` until `stop`; `tell` hears null when all is well, and otherwise {sentence, again_s}. */
export class Poll {
  constructor(work, tell) {
    this.work = work;
    this.tell = tell;
    this.wait_s = EVERY_S;
    this.timer = null;
    this.over = false;
    this.seen = () => document.hidden || this.now();
    document.addEventListener("visibilitychange", this.seen);
    this.now();
  }

  /** Now, and from then on as usual. */
  now() {
    clearTimeout(this.timer);
    if (this.busy) this.again = true;
    else this.turn();
  }

  stop() {
    this.over = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.seen);
  }

  async turn() {
    this.busy = true;
    try {
      const every_s = await this.work();
      this.wait_s = every_s ?? EVERY_S;
      if (!this.over) this.tell(null);
    } catch (error) {
      if (!(error instanceof Away)) throw error;
      this.wait_s = Math.min(LONGEST_S, this.wait_s * 2);
      if (!this.over) this.tell({ sentence: error.message, again_s: this.wait_s });
    } finally {
      this.busy = false;
      const at_once = this.again;
      this.again = false;
      if (!this.over && !document.hidden) this.timer = setTimeout(() => this.turn(), at_once ? 0 : this.wait_s * 1000);
    }
  }
}
