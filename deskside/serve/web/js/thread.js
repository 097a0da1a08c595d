/** The messages of the open conversation, and staying at their end while an answer is written. */

import { branch } from "./conversation.js";
import { announce, byId } from "./dom.js";
import { Turn } from "./turn.js";

const NEAR_END = 80;  // pixels

export class Thread {
  constructor(session) {
    this._session = session;
    this._turns = new Map();  // message id -> Turn
    this._view = byId("thread");
    this._follows = true;
    this._shown = null;
    this._frame = null;
    session.addEventListener("conversation", () => this.draw());
    session.addEventListener("models", () => this.draw());
    session.addEventListener("progress", () => this._soon());
    session.addEventListener("running", (event) => this._say(event.detail));
    this._view.addEventListener("scroll", () => this._scrolled(), { passive: true });
    byId("to-end").addEventListener("click", () => this._toEnd());
  }

  /** Show the shown branch. Turns that remain keep their elements. */
  draw() {
    const { conversation } = this._session;
    const messages = branch(conversation);
    const list = byId("turns");
    if (this._shown !== conversation) {
      this._turns.clear();
      this._shown = conversation;
      this._follows = true;
    }
    const turns = messages.map((message) => this._turns.get(message.id) ?? new Turn(this._session, message));
    this._turns = new Map(turns.map((turn) => [turn.message.id, turn]));
    turns.forEach((turn, index) => {
      if (list.children[index] !== turn.element) list.insertBefore(turn.element, list.children[index] ?? null);
    });
    while (list.children.length > turns.length) list.lastElementChild.remove();
    turns.forEach((turn) => turn.update());
    byId("empty").hidden = messages.length > 0;
    this._settle();
  }

  /** Draw once per frame, however many tokens arrive. */
  _soon() {
    this._frame ??= requestAnimationFrame(() => {
      this._frame = null;
      this._turns.get(this._session.conversation.leaf)?.update();
      this._settle();
    });
  }

  _settle() {
    if (this._follows) this._view.scrollTop = this._view.scrollHeight;
    this._scrolled();
  }

  _scrolled() {
    const left = this._view.scrollHeight - this._view.scrollTop - this._view.clientHeight;
    this._follows = left < NEAR_END;
    byId("to-end").hidden = this._follows;
  }

  _toEnd() {
    this._follows = true;
    this._settle();
  }

  /** An answer is read aloud as a whole; parts of words that change all the time are not. */
  _say(how) {
    if (how === "begins") {
      this._toEnd();
      announce("The model is writing");
    }
    if (how === "stopped") announce("Stopped");
    if (how === "complete") {
      const last = byId("turns").lastElementChild?.querySelector(".text");
      announce(`The answer is complete. ${last?.innerText ?? ""}`);
    }
  }
}
