/** One message in the thread: its text, what is folded beside it, its numbers, and what can be done with it. */

import { versions } from "./conversation.js";
import { copyText, fitHeight, icon, iconButton, make, textButton } from "./dom.js";
import { tokensPerSecond } from "./generation.js";
import { MarkdownView } from "./markdown.js";

const NOTES = {
  length: "Ended at the maximum number of tokens.",
  stopped: "Stopped.",
  lost: "The connection was lost before the answer was complete.",
};

/** Shows one message of a session's open conversation. */
export class Turn {
  constructor(session, message) {
    this._session = session;
    this.message = message;
    const who = { user: "You", assistant: message.model || "Model", tool: "Tool result" }[message.role];
    this._text = make("div", { class: message.role === "assistant" ? "text markdown" : "text plain" });
    this._folds = make("div", { class: "folds" });
    this._foot = make("div", { class: "foot" });
    this._head = make("h2", { class: message.role === "user" ? "unseen" : "who", text: who });
    this.element = make("article", { class: `turn ${message.role}` }, this._head, this._folds, this._text, this._foot);
    this._calls = [];
    this._form = null;  // while the message is edited
    this._drawn = "";  // what the foot shows
  }

  /** Show the message as it is now. */
  update() {
    const { message, _session: session } = this;
    const isRunning = session.running === message;
    this.element.setAttribute("aria-busy", String(isRunning));
    if (message.role === "assistant") {
      if (message.model) this._head.textContent = message.model;
      this._showReasoning(isRunning);
      this._showText();
      this._showCalls();
      this._text.classList.toggle("writing", isRunning);
    } else {
      this._text.textContent = message.content;
    }
    this._updateFoot(isRunning);
    if (this._form) this._form.querySelector("[type=submit]").disabled = Boolean(session.running);
  }

  /** A model without a chat template continues text, which is no Markdown in particular. */
  _showText() {
    const isPlain = this._session.model !== null && !this._session.model.chat_template;
    this._text.classList.toggle("plain", isPlain);
    if (isPlain) {
      this._text.textContent = this.message.content;
      this._markdown = null;  // its elements are gone
    } else (this._markdown ??= new MarkdownView(this._text)).show(this.message.content);
  }

  _showReasoning(isRunning) {
    const { message } = this;
    if (!message.reasoning) return;
    if (!this._reasoning) {
      const summary = make("summary", {}, icon("chevron"), make("span"));
      const text = make("div", { class: "markdown" });
      this._reasoning = { label: summary.lastChild, view: new MarkdownView(text) };
      this._folds.prepend(make("details", { class: "fold reasoning" }, summary, text));
    }
    this._reasoning.label.textContent = isRunning && !message.content ? "Reasoning …" : "Reasoning";
    this._reasoning.view.show(message.reasoning);
  }

  _showCalls() {
    (this.message.calls ?? []).forEach((call, index) => {
      if (!this._calls[index]) {
        const given = make("pre", { tabindex: "0", role: "region" });
        const summary = make("summary", {}, icon("chevron"), "Tool call: ", make("code"));
        this._calls[index] = { name: summary.lastChild, given };
        this._folds.append(make("details", { class: "fold call" }, summary, given));
      }
      const { name, given } = this._calls[index];
      name.textContent = call.name;
      given.setAttribute("aria-label", `Arguments of ${call.name}`);
      given.textContent = indented(call.arguments);
    });
  }

  _updateFoot(isRunning) {
    const { message, _session: session } = this;
    const { conversation } = session;
    const isLast = conversation.leaf === message.id;
    const all = versions(conversation, message);
    const error = session.errors.get(message.id) ?? "";
    // Buttons are made again only when they change, so that the one in focus keeps it while an answer grows.
    const drawn = JSON.stringify([
      isRunning, Boolean(session.running), session.waiting, session.model?.id, isLast, all.length, error,
      message.finish, message.usage,
    ]);
    if (drawn === this._drawn) return;
    this._drawn = drawn;
    this._foot.replaceChildren(...this._notes(isRunning, isLast, error), this._actions(isRunning, all));
    if (isLast && !session.running && message.calls?.length) this._foot.append(this._resultsForm());
  }

  _notes(isRunning, isLast, error) {
    const { message, _session: session } = this;
    const found = [];
    const isQuestion = message.role !== "assistant";
    // An answer without an end that nobody is writing was cut off when the page was closed.
    const note = isQuestion || isRunning ? null : (NOTES[message.finish] ?? (message.finish ? null : NOTES.lost));
    if (note && !error) found.push(make("p", { class: "note", text: note }));
    if (!isRunning && message.finish === "stop" && !message.content && !message.calls) {
      found.push(make("p", { class: "note", text: "The answer is empty." }));
    }
    if (error) found.push(make("p", { class: "error", role: "alert", text: error }));
    if (isLast && !isRunning && this._canContinue()) {
      const go = () => session.continueAnswer(message);
      found.push(textButton("forward", "Continue", go, { class: "small" }));
    }
    if (isQuestion && isLast && !session.running) {
      if (session.waiting) found.push(make("p", { class: "note", text: "Will be sent when the server is back." }));
      else {
        const words = error ? "Try again" : "Answer";
        found.push(textButton("redo", words, () => session.answerLast(), { class: "small" }));
      }
    }
    return found;
  }

  /** A call that is cut off cannot go on, nor an answer that is still reasoning: its text has not begun. */
  _canContinue() {
    const { message, _session: session } = this;
    if (message.role !== "assistant" || session.model === null) return false;
    if (!message.content || message.calls?.length) return false;
    return !session.model.chat_template || message.finish !== "stop";
  }

  _actions(isRunning, all) {
    const { message, _session: session } = this;
    const bar = make("div", { class: "actions", role: "group", "aria-label": "Actions" });
    const versionSwitch = all.length > 1 ? this._versionSwitch(all) : "";
    if (isRunning) {
      bar.append(versionSwitch);
      return bar;
    }
    const copy = iconButton("copy", "Copy", () => copyText(message.content, copy));
    bar.append(copy);
    if (!session.running) {
      if (message.role !== "tool") bar.append(iconButton("edit", "Edit", () => this._edit()));
      if (message.role === "assistant") {
        bar.append(iconButton("redo", "Regenerate", () => session.regenerate(message)));
      }
    }
    bar.append(versionSwitch, message.usage ? usageText(message.usage) : "");
    return bar;
  }

  _versionSwitch(all) {
    const { message, _session: session } = this;
    const place = all.indexOf(message);
    const go = (step) => session.showVersion(all[place + step]);
    const isBusy = Boolean(session.running);
    return make("span", { class: "versions", role: "group", "aria-label": "Versions" },
      iconButton("left", "Previous version", () => go(-1), { disabled: isBusy || place === 0 }),
      make("span", { text: `${place + 1} / ${all.length}` }),
      iconButton("right", "Next version", () => go(1), { disabled: isBusy || place === all.length - 1 }));
  }

  /** Replace the text by a form that adds another version of the message. */
  _edit() {
    const { message, _session: session } = this;
    const area = make("textarea", { "aria-label": message.role === "user" ? "Edit the question" : "Edit the answer" });
    area.value = message.content;
    const close = () => {
      form.replaceWith(this._text);
      this._form = null;
      this._foot.hidden = false;
      this._foot.querySelector("[aria-label=Edit]")?.focus();
    };
    const form = make("form", { class: "edit" }, area,
      make("div", { class: "row" },
        make("button", { type: "button", text: "Cancel", on: { click: close } }),
        make("button", { type: "submit", class: "main", text: message.role === "user" ? "Send" : "Save" })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (session.running) return;  // one answer at a time, also by Ctrl+Enter, which needs no button
      close();
      if (area.value !== message.content && area.value.trim()) session.edit(message, area.value);
    });
    area.addEventListener("input", () => fitHeight(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this._text.replaceWith(form);
    this._form = form;
    this._foot.hidden = true;
    fitHeight(area);
    area.focus();
  }

  /** The page runs no tools: the user gives the result of each call. */
  _resultsForm() {
    const { message, _session: session } = this;
    const areas = message.calls.map(() => make("textarea", { rows: "2", required: true }));
    const fields = message.calls.map(({ name }, index) => make("label", { text: `Result of ${name}` }, areas[index]));
    const form = make("form", { class: "results" }, ...fields,
      make("div", { class: "row" }, make("button", { type: "submit", class: "main", text: "Send results" })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      session.giveResults(message, areas.map((area) => area.value));
    });
    return form;
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch (error) {
    // RangeError: nested too deeply to be written again.
    if (!(error instanceof SyntaxError || error instanceof RangeError)) throw error;
    return json;  // not complete yet, or not JSON
  }
}

function usageText(usage) {
  const speed = tokensPerSecond(usage);
  const words = [`${usage.completion} ${usage.completion === 1 ? "token" : "tokens"}`];
  if (speed !== null) words.push(`${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s`);
  const more = `Prompt: ${usage.prompt} tokens. First token after ${usage.first.toFixed(2)} s.`;
  const spoken = make("span", { class: "unseen", text: `. ${more}` });
  return make("span", { class: "usage", title: more, text: words.join(" · ") }, spoken);
}
