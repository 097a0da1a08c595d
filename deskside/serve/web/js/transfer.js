/**
 * Conversations as JSON files.
 *
 * A file is a list of {"title", "created", "updated", "messages", "deskside"}. `messages` is the shown branch in
 * OpenAI's format, for any other program; `deskside` has all versions, and is what an import here reads. An import
 * also takes one such object, {"messages": [...]} of another program, or a bare list of messages.
 */

import { addMessage, branch, newConversation, openAiMessages } from "./conversation.js";
import { make } from "./dom.js";

const ROLES = ["user", "assistant", "tool"];

/** Return the text of a file with these conversations. */
export function exported(conversations) {
  return JSON.stringify(conversations.map((conversation) => {
    const { title, created, updated, system, leaf, messages } = conversation;
    return {
      title,
      created: new Date(created).toISOString(),
      updated: new Date(updated).toISOString(),
      messages: openAiMessages(system, branch(conversation)),
      deskside: { system, leaf, messages: Object.values(messages) },
    };
  }), null, 1);
}

/** Offer a text as a file. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Return the conversations of a file, as new ones. Throws SyntaxError or TypeError if any part of it is not one. */
export function imported(text) {
  const value = JSON.parse(text);
  const isOneList = Array.isArray(value) && value.length > 0 && value.every((entry) => typeof entry?.role === "string");
  const entries = isOneList ? [{ messages: value }] : Array.isArray(value) ? value : [value];
  if (!entries.length) throw new TypeError("There is no conversation in it");
  return entries.map((entry, index) => conversationOf(entry, `conversation ${index + 1}`));
}

function conversationOf(entry, where) {
  if (!Array.isArray(entry?.messages)) throw new TypeError(`${where}: there is no list of "messages"`);
  const conversation = entry.deskside ? fromTree(entry.deskside, where) : fromMessages(entry.messages, where);
  if (entry.title !== undefined) conversation.title = checkedText(entry.title, `${where}: title`);
  conversation.title ||= "Imported conversation";
  for (const name of ["created", "updated"]) conversation[name] = Date.parse(entry[name]) || conversation[name];
  return conversation;
}

function fromMessages(messages, where) {
  const conversation = newConversation();
  messages.forEach((message, index) => {
    const place = `${where}, message ${index + 1}`;
    if (message === null || typeof message !== "object") throw new TypeError(`${place} is no object`);
    if (!Array.isArray(message.tool_calls ?? [])) throw new TypeError(`${place}: the calls must be a list`);
    if (["system", "developer"].includes(message.role)) {
      if (index > 0) throw new TypeError(`${place}: only the first message may have the role ${message.role}`);
      conversation.system = contentOf(message, place);
      return;
    }
    const calls = (message.tool_calls ?? []).map((call) => ({
      id: call?.id, name: call?.function?.name, arguments: call?.function?.arguments,
    }));
    addMessage(conversation, conversation.leaf, checkedMessage({
      role: message.role,
      content: contentOf(message, place),
      reasoning: message.reasoning_content,
      calls: calls.length ? calls : undefined,
      callId: message.tool_call_id,
      finish: message.role === "assistant" ? "stop" : undefined,
    }, place));
  });
  return conversation;
}

/** Take over all versions, with new identifiers, so that an import never overwrites what is there. */
function fromTree(tree, where) {
  if (!Array.isArray(tree.messages)) throw new TypeError(`${where}: "deskside" has no list of messages`);
  const conversation = newConversation(checkedText(tree.system ?? "", `${where}: system`));
  const ids = new Map([[null, null]]);
  const inOrder = [...tree.messages].sort((a, b) => a?.created - b?.created);  // parents come before their children
  inOrder.forEach((message, index) => {
    const place = `${where}, version ${index + 1}`;
    if (!message || !ids.has(message.parent)) throw new TypeError(`${place}: its parent is missing`);
    if (!Number.isFinite(message.created)) throw new TypeError(`${place}: its time must be a number`);
    const added = addMessage(conversation, ids.get(message.parent), checkedMessage(message, place));
    added.created = message.created;
    ids.set(message.id, added.id);
  });
  if (!ids.has(tree.leaf)) throw new TypeError(`${where}: its last message is missing`);
  conversation.leaf = ids.get(tree.leaf);
  return conversation;
}

/** Return the fields of a message that this page knows. Throws TypeError if one has the wrong type. */
function checkedMessage({ role, content, reasoning, calls, callId, model, finish, usage }, where) {
  if (!ROLES.includes(role)) throw new TypeError(`${where}: the role must be one of ${ROLES.join(", ")}`);
  const message = { role, content: checkedText(content, `${where}: content`) };
  for (const [name, text] of Object.entries({ reasoning, callId, model, finish })) {
    if (text !== undefined && text !== null) message[name] = checkedText(text, `${where}: ${name}`);
  }
  if (calls !== undefined) {
    if (!Array.isArray(calls)) throw new TypeError(`${where}: the calls must be a list`);
    message.calls = calls.map((call) => Object.fromEntries(
      ["id", "name", "arguments"].map((name) => [name, checkedText(call?.[name], `${where}: ${name} of a call`)])));
  }
  if (usage) {
    const names = ["prompt", "completion", "first", "timed", "seconds"];
    if (!names.every((name) => Number.isFinite(usage[name]))) throw new TypeError(`${where}: its usage is not numbers`);
    message.usage = Object.fromEntries(names.map((name) => [name, usage[name]]));
  }
  return message;
}

function contentOf(message, where) {
  const content = message.content ?? "";
  if (!Array.isArray(content)) return checkedText(content, `${where}: content`);
  return content.map((part) => checkedText(part?.text, `${where}: a part of the content`)).join("");
}

function checkedText(value, where) {
  if (typeof value !== "string") throw new TypeError(`${where} must be text`);
  return value;
}
