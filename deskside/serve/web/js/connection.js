/**
 * Whether the server can be reached, and the banner that says if not.
 *
 * It is asked every few seconds while the page is visible, and after a failure at growing intervals until it answers.
 * Events: "back" (it answers again), "key" (it asks for an API key).
 */

import { ServerError, ServerGone, getHealth } from "./api.js";
import { announce, byId } from "./dom.js";

const WATCH_SECONDS = 5;
const RETRY_SECONDS = [1, 2, 3, 5, 8, 10];
const WORDS = {
  gone: "The server cannot be reached.",
  draining: "The server is stopping.",
  failed: "The server's device has failed: restart the server.",
};

export class Connection extends EventTarget {
  constructor() {
    super();
    this._state = "ok";
    this._attempts = 0;  // failed ones in a row
    this._left = WATCH_SECONDS;  // until the next
    byId("retry").addEventListener("click", () => this.check());
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    this._timer = setInterval(() => this._tick(), 1000);
  }

  /** Take note of an error of a request. */
  report(error) {
    if (error instanceof ServerGone) this._set("gone");
    if (error instanceof ServerError && error.status === 401) this.dispatchEvent(new Event("key"));
  }

  /** Ask the server now. */
  async check() {
    let state;
    try {
      state = await getHealth();
    } catch (error) {
      if (!(error instanceof ServerGone || error instanceof SyntaxError)) throw error;
      state = "gone";  // SyntaxError: something else answers at its address
    }
    this._set(state);
  }

  _tick() {
    if (document.hidden && this._state === "ok") return;
    this._left -= 1;
    if (this._left > 0) this._draw();
    else if (this._left === 0) this.check();
  }

  _set(state) {
    const was = this._state;
    this._state = state;
    this._attempts = state === "ok" ? 0 : this._attempts + 1;
    const waits = RETRY_SECONDS[Math.min(this._attempts, RETRY_SECONDS.length) - 1];
    this._left = state === "ok" ? WATCH_SECONDS : waits;
    this._draw();
    if (state === "ok" && was !== "ok") {
      announce("The server is back");
      this.dispatchEvent(new Event("back"));
    }
  }

  _draw() {
    const isGone = this._state !== "ok";
    const words = WORDS[this._state] ?? "";
    if (byId("gone-words").textContent !== words) byId("gone-words").textContent = words;  // is read aloud once
    byId("gone-next").textContent = `Next attempt in ${Math.max(1, this._left)} s. Your conversations are kept.`;
    byId("gone").hidden = !isGone;
  }
}
