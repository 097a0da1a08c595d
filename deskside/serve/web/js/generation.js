/** One answer while it is generated: the request, and what its events add to the message. */

import { detokenize, streamEvents, tokenize } from "./api.js";
import { branch, openAiMessages } from "./conversation.js";
import { chatFields, samplingFields } from "./settings.js";

const THINK_TOKENS = 16;  // at the end of a prompt, where a template may open the reasoning

/**
 * Generate or continue `message`, an answer at the end of the shown branch, in place.
 *
 * onChange: called after every event. Throws what `streamEvents` throws; the message then has what had arrived.
 */
export async function generate({ conversation, message, model, settings, signal, onChange }) {
  const before = branch(conversation, message.parent);
  const continues = Boolean(message.content);
  const request = await requestFor({ conversation, message, before, model, settings, signal });
  const clock = new Clock();
  const body = { ...request.body, stream_options: { include_usage: true } };
  for await (const event of streamEvents(request.path, body, signal)) {
    const choice = event.choices[0];
    if (choice) {
      const delta = choice.delta ?? { content: choice.text };
      clock.event(Boolean(delta.content || delta.reasoning_content || delta.tool_calls));
      addDelta(message, delta);
      message.finish = choice.finish_reason;  // null until the last
    }
    if (event.usage) addUsage(message, event.usage, clock, continues);
    onChange();
  }
}

async function requestFor({ conversation, message, before, model, settings, signal }) {
  const common = samplingFields(settings, model);
  if (!model.chat_template) {
    const text = [...before, message].map((part) => part.content).join("");
    return { path: "v1/completions", body: { ...common, prompt: text } };
  }
  const chat = { messages: openAiMessages(conversation.system, before), ...chatFields(settings, model) };
  if (!message.content) return { path: "v1/chat/completions", body: { ...common, ...chat } };
  const prompt = await promptTokens(message, { model: model.id, ...chat }, signal);
  return { path: "v1/completions", body: { ...common, prompt } };
}

/** Return the tokens of a chat's prompt and of the beginning of its answer, which the model then continues. */
async function promptTokens(message, chat, signal) {
  const prompt = await tokenize(chat, signal);
  let written = message.content;
  if (message.reasoning) {
    const end = (await detokenize(prompt.slice(-THINK_TOKENS), signal)).trimEnd();
    const open = end.endsWith("<think>") ? "" : "<think>\n";
    written = `${open}${message.reasoning}\n</think>\n\n${written}`;
  }
  const answer = await tokenize({ prompt: written, add_special_tokens: false }, signal);
  return [...prompt, ...answer];
}

function addDelta(message, delta) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id += part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
}

/** Add the token counts of one request; an answer that was continued has had several. */
function addUsage(message, usage, clock, continues) {
  const earlier = continues && message.usage ? message.usage : { completion: 0, seconds: 0, timed: 0 };
  const first = earlier.first ?? clock.firstSeconds;
  message.usage = {
    prompt: earlier.prompt ?? usage.prompt_tokens,
    completion: earlier.completion + usage.completion_tokens,
    first,
    // The time from the first token to the last holds one token less than the answer has.
    timed: earlier.timed + Math.max(0, usage.completion_tokens - 1),
    seconds: earlier.seconds + clock.streamSeconds,
  };
}

/** Measures the time to the first event that adds to the answer, and from it to the last. */
class Clock {
  constructor() {
    this._start = performance.now();
    this._first = null;
    this._last = this._start;
  }

  event(adds) {
    this._last = performance.now();
    if (adds) this._first ??= this._last;
  }

  get firstSeconds() {
    return ((this._first ?? this._last) - this._start) / 1000;
  }

  get streamSeconds() {
    return this._first === null ? 0 : (this._last - this._first) / 1000;
  }
}

/** Return the tokens per second of an answer, or null if it is too short to say. */
export function tokensPerSecond(usage) {
  return usage.timed >= 4 && usage.seconds > 0 ? usage.timed / usage.seconds : null;
}
