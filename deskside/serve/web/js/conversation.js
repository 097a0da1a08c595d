/**
 * Conversations as trees of messages.
 *
 * An edited question and a regenerated answer are new children of the same parent, so nothing is ever replaced: a
 * message with siblings has several versions. `leaf` is the last message of the branch that is shown.
 *
 *     {id, title, created, updated, system, leaf, messages: {id: message}}
 *     message: {id, parent, created, role, content, reasoning?, calls?, callId?, model?, finish?, usage?}
 */

/** Return an empty conversation. Times are milliseconds since 1970. */
export function newConversation(system = "") {
  const now = Date.now();
  return { id: randomId(), title: "", created: now, updated: now, system, leaf: null, messages: {} };
}

/** As crypto.randomUUID, which exists on https and localhost only. */
function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Add a message below `parent` (an id, or null), show it, and return it. */
export function addMessage(conversation, parent, fields) {
  // Versions are ordered by time, so two of one millisecond must not have the same.
  const newest = Math.max(0, ...Object.values(conversation.messages).map((message) => message.created));
  const message = { id: randomId(), parent, created: Math.max(Date.now(), newest + 1), ...fields };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.content);
  return message;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** Return the messages of the shown branch, first to last, or those up to the message `id`. */
export function branch(conversation, id = conversation.leaf) {
  const found = [];
  for (let message = conversation.messages[id]; message; message = conversation.messages[message.parent]) {
    found.push(message);
  }
  return found.reverse();
}

function children(conversation, parent) {
  return Object.values(conversation.messages)
    .filter((message) => message.parent === parent)
    .sort((a, b) => a.created - b.created);
}

/** Return all versions of a message, itself among them, oldest first. */
export function versions(conversation, message) {
  return children(conversation, message.parent);
}

/** Show a version of a message, and the newest messages that follow it. */
export function showVersion(conversation, message) {
  let last = message;
  for (let below = children(conversation, last.id); below.length; below = children(conversation, last.id)) {
    last = below.at(-1);
  }
  conversation.leaf = last.id;
}

/** Return messages in OpenAI's format, with the system message first if there is one. */
export function openAiMessages(system, messages) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content, reasoning, calls, callId } of messages) {
    const message = { role, content };
    if (reasoning) message.reasoning_content = reasoning;
    if (calls?.length) {
      message.content = content || null;
      message.tool_calls = calls.map(({ id, name, arguments: given }) => (
        { id, type: "function", function: { name, arguments: given } }
      ));
    }
    if (callId) message.tool_call_id = callId;
    found.push(message);
  }
  return found;
}
