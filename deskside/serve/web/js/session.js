/**
 * What the page does: the open conversation, the answers that are being generated, and what the user may do with them.
 *
 * Views listen to its events: "conversation" (another one is open, or its branch or title has changed), "progress"
 * (the last answer has grown), "running" (an answer has begun or ended; `detail` is how it ended), "list" (the list of
 * conversations has changed), "models", "settings".
 */

import { ServerError, ServerGone, getModels } from "./api.js";
import { addMessage, branch, newConversation, showVersion } from "./conversation.js";
import { generate } from "./generation.js";
import { loadSettings, saveSettings } from "./settings.js";
import { getConversation, removeConversations, saveConversation } from "./store.js";

const SAVE_MILLISECONDS = 1000;  // between two savings of an answer that is being generated

export class Session extends EventTarget {
  constructor(connection) {
    super();
    this.connection = connection;
    this.settings = loadSettings();
    this.models = [];
    this.conversation = newConversation(this.settings.system ?? "");
    this._running = new Map();  // conversation id -> {conversation, message, stop: AbortController}
    this._waiting = new Set();  // conversations whose question is sent when the server is back
    this._removed = new Set();  // conversations that are not saved any more
    this.errors = new Map();    // message id -> why it has no answer
    connection.addEventListener("back", () => this.recover());
  }

  _tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** The chosen model; null until the server has said which it serves. */
  get model() {
    return this.models.find(({ id }) => id === this.settings.model) ?? this.models[0] ?? null;
  }

  /** The answer that is being generated in the open conversation, or undefined. */
  get running() {
    return this._running.get(this.conversation.id)?.message;
  }

  /** Whether the open conversation waits for the server to return. */
  get waiting() {
    return this._waiting.has(this.conversation.id);
  }

  /** Ask the server for its models. Return whether it answered. */
  async loadModels() {
    try {
      await this._readModels();
    } catch (error) {
      if (!(error instanceof ServerGone || error instanceof ServerError)) throw error;
      this.connection.report(error);
      return false;
    }
    return true;
  }

  async _readModels() {
    this.models = await getModels();
    this._tell("models");
  }

  changeSettings(changes) {
    this.settings = { ...this.settings, ...changes };
    saveSettings(this.settings);
    this._tell("settings");
  }

  /** Save what is being generated, before the page is closed. */
  saveRunning() {
    for (const { conversation } of this._running.values()) this._store(conversation);
  }

  /** Change the system message of the open conversation, which new ones begin with as well. */
  async changeSystem(system) {
    this.conversation.system = system;
    this.changeSettings({ system });
    if (this.conversation.leaf !== null) await this._save(this.conversation);
  }

  /** Open a new conversation; it is saved with its first message. */
  newChat() {
    this.conversation = newConversation(this.settings.system ?? "");
    this._tell("conversation");
  }

  /** Open a saved conversation. Return false if there is none with this id. */
  async open(id) {
    // One that is being answered is further on in memory than in the store.
    const found = this._running.get(id)?.conversation ?? (await getConversation(id));
    if (!found || this._removed.has(id)) return false;
    this.conversation = found;
    this._tell("conversation");
    return true;
  }

  /** Add a question to the open conversation and have it answered. */
  async send(text) {
    await this._addAndAnswer(this.conversation.leaf, { role: "user", content: text });
  }

  /** Answer again; the earlier answer remains as another version. */
  async regenerate(message) {
    await this._answer(this.conversation, message.parent);
  }

  /** Add another version of a message. One of a question is answered. */
  async edit(message, text) {
    if (message.role === "user") return this._addAndAnswer(message.parent, { role: "user", content: text });
    const { role, reasoning, calls, model } = message;
    addMessage(this.conversation, message.parent, { role, reasoning, calls, model, content: text, finish: "stop" });
    this._tell("conversation");
    return this._save(this.conversation);
  }

  async _addAndAnswer(parent, fields) {
    const conversation = this.conversation;
    const message = addMessage(conversation, parent, fields);
    await this._answer(conversation, message.id);
  }

  /** Add the results of an answer's tool calls, one text each, and have them answered. */
  async giveResults(message, results) {
    const conversation = this.conversation;
    let parent = message.id;
    message.calls.forEach((call, index) => {
      parent = addMessage(conversation, parent, { role: "tool", content: results[index], callId: call.id }).id;
    });
    await this._answer(conversation, parent);
  }

  /** Answer the last question, which has no answer yet. */
  async answerLast() {
    await this._answer(this.conversation, this.conversation.leaf);
  }

  /** Let the model go on where an answer was cut off. */
  async continueAnswer(message) {
    await this._run(this.conversation, message);
  }

  async showVersion(message) {
    showVersion(this.conversation, message);
    this._tell("conversation");
    await this._save(this.conversation);
  }

  async rename(conversation, title) {
    if (this._running.has(conversation.id)) conversation = this._running.get(conversation.id).conversation;
    if (conversation.id === this.conversation.id) conversation = this.conversation;
    conversation.title = title;
    this._tell("conversation");
    await this._save(conversation);
  }

  /** Delete conversations, and end their answers. */
  async remove(ids) {
    for (const id of ids) {
      this._removed.add(id);
      this._stop(id);
    }
    if (ids.includes(this.conversation.id)) this.newChat();  // before any wait: a question sent meanwhile belongs to it
    await removeConversations(ids);
    this._tell("list");
  }

  /** Stop the answer of the open conversation, and do not send what waits for the server. */
  stop() {
    this._stop(this.conversation.id);
  }

  _stop(id) {
    this._running.get(id)?.stop.abort();
    if (this._waiting.delete(id)) {
      this._tell("conversation");
      this._tell("running", "stopped");
    }
  }

  async _answer(conversation, parent) {
    const fields = { role: "assistant", content: "", model: this.model?.id ?? "" };
    await this._run(conversation, addMessage(conversation, parent, fields));
  }

  async _run(conversation, message) {
    const stop = new AbortController();
    this._running.set(conversation.id, { conversation, message, stop });
    this._waiting.delete(conversation.id);
    this.errors.delete(message.parent);
    this.errors.delete(message.id);
    this._tell("conversation");
    this._tell("running", "begins");
    this.connection.heard(stop);
    await this._save(conversation);
    let saved = performance.now();
    const onChange = () => {
      this.connection.heard(stop);
      if (conversation === this.conversation) this._tell("progress");
      if (performance.now() - saved < SAVE_MILLISECONDS) return;
      saved = performance.now();
      this._store(conversation);
    };
    let ended = "complete";
    try {
      if (this.model === null) await this._readModels();
      const [model, settings] = [this.model, this.settings];
      message.model = model.id;
      await generate({ conversation, message, model, settings, signal: stop.signal, onChange });
    } catch (error) {
      ended = this._failed(conversation, message, error);
    } finally {
      this.connection.ended(stop);
      this._running.delete(conversation.id);
    }
    await this._save(conversation);
    this._tell("conversation");
    this._tell("running", conversation === this.conversation ? ended : "elsewhere");
  }

  /** Keep what an unfinished answer has. Without anything, it leaves, and its question says why. */
  _failed(conversation, message, error) {
    const gone = error instanceof ServerGone;
    const stopped = error.name === "AbortError";
    if (!gone && !stopped && !(error instanceof ServerError)) throw error;
    if (!stopped) this.connection.report(error);
    const empty = isEmpty(message);
    if (empty) {
      delete conversation.messages[message.id];
      conversation.leaf = message.parent;
      if (gone) this._waiting.add(conversation.id);
    } else if (stopped || gone) {
      message.finish = stopped ? "stopped" : "lost";
    }
    if (!stopped && !(gone && empty)) this.errors.set(empty ? message.parent : message.id, error.message);
    return stopped ? "stopped" : gone ? "gone" : "refused";
  }

  /** The server is back, or has its key: its models may be others, and what waited is sent. */
  async recover() {
    if (!(await this.loadModels())) return;
    for (const id of [...this._waiting]) {
      const conversation = id === this.conversation.id ? this.conversation : await getConversation(id);
      this._waiting.delete(id);
      if (conversation && branch(conversation).at(-1)?.role !== "assistant") {
        this._answer(conversation, conversation.leaf);
      }
    }
  }

  async _save(conversation) {
    await this._store(conversation);
    this._tell("list");
  }

  /** An answer that has nothing yet is not stored: it leaves again if it fails. */
  async _store(conversation) {
    if (this._removed.has(conversation.id)) return;
    const { message } = this._running.get(conversation.id) ?? {};
    let saved = conversation;
    if (message && isEmpty(message)) {
      const { [message.id]: _, ...messages } = conversation.messages;
      saved = { ...conversation, leaf: message.parent, messages };
    }
    await saveConversation(saved);
  }
}

function isEmpty(message) {
  return !message.content && !message.reasoning && !message.calls;
}
