/** How answers are sampled: the fields of the settings dialog, their limits, and the part of a request they make. */

const KEY = "deskside.settings";

/** The number fields. One with `step` 1 is whole. An empty one is not sent; `placeholder` says what that means. */
export const NUMBERS = [
  {
    name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, value: 0.8,
    help: "0 always takes the most probable token",
  },
  {
    name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.01, value: 1,
    help: "The most probable tokens of this total probability",
  },
  {
    name: "top_k", label: "Top-k", min: 0, max: 2 ** 31 - 1, step: 1, value: 0,
    help: "The k most probable tokens; 0 for all",
  },
  {
    name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, value: 0,
    help: "Tokens of this share of the greatest probability",
  },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, value: "", help: "Of one answer" },
  {
    name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, value: "", placeholder: "random",
    help: "The same seed gives the same answer",
  },
  {
    name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 10, step: 0.01, value: 1,
    help: "Above 1: fewer tokens that occurred",
  },
  {
    name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, value: 0,
    help: "Per occurrence in the answer",
  },
  {
    name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, value: 0,
    help: "Once for what the answer has",
  },
];

const DEFAULTS = {
  ...Object.fromEntries(NUMBERS.map(({ name, value }) => [name, value])),
  thinking: "default",  // or "on", "off": the template's enable_thinking
  tools: "",            // JSON: a list of OpenAI's function tools
};

/** The settings of this browser. Reading never fails: what cannot be read is as at first. */
export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEY) ?? "{}") };
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return { ...DEFAULTS };
  }
}

export function saveSettings(settings) {
  localStorage.setItem(KEY, JSON.stringify(settings));
}

/** Return the settings with sampling as at first; the model stays. */
export function resetSettings(settings) {
  return { ...settings, ...DEFAULTS };
}

/** Return the tools of the settings, or undefined. Throws a SyntaxError or TypeError for what is no list. */
export function parseTools(text) {
  if (!text.trim()) return undefined;
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new TypeError("Tools must be a list: [{\"type\": \"function\", ...}]");
  return tools.length ? tools : undefined;
}

/** Return the fields of a request that all completions share. */
export function samplingFields(settings, model) {
  const fields = { model: model.id };
  for (const { name, value } of NUMBERS) {
    if (settings[name] !== "" && (settings[name] !== value || name === "temperature")) fields[name] = settings[name];
  }
  fields.max_tokens ??= model.max_tokens;
  return fields;
}

/** Return the fields of a request that only chats have. */
export function chatFields(settings, model) {
  const fields = {};
  const tools = parseTools(settings.tools);
  if (tools) fields.tools = tools;
  if (settings.thinking !== "default" && canThink(model)) {
    fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  }
  return fields;
}

/** Return whether the model's chat template can be told to reason or not to. */
export function canThink(model) {
  return model.chat_template_variables.includes("enable_thinking");
}
