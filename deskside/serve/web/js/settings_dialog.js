/** The settings dialog: system message, sampling, reasoning, tools, and how the page looks. Changes hold at once. */

import { byId, fitHeight, make } from "./dom.js";
import { NUMBERS, canThink, parseTools, resetSettings } from "./settings.js";
import { setTheme, theme } from "./theme.js";

export class SettingsDialog {
  constructor(session) {
    this._session = session;
    for (const { name, label, help, placeholder, min, max, step } of NUMBERS) {
      const id = `setting-${name}`;
      const input = make("input", {
        type: "number", id, min, max, step: "any", placeholder, "aria-describedby": `${id}-help`,
        inputmode: step < 1 ? "decimal" : "numeric",
      });
      input.addEventListener("change", () => this._changeNumber(name, step, input));
      const below = make("small", { id: `${id}-help`, text: help });
      byId("numbers").append(make("div", { class: "field" }, make("label", { for: id, text: label }), input, below));
    }
    byId("system").addEventListener("change", () => session.changeSystem(byId("system").value));
    byId("thinking").addEventListener("change", () => session.changeSettings({ thinking: byId("thinking").value }));
    byId("theme").addEventListener("change", () => setTheme(byId("theme").value));
    byId("tools").addEventListener("change", () => this._changeTools());
    byId("reset").addEventListener("click", () => {
      session.changeSettings(resetSettings(session.settings));
      this._draw();
    });
    for (const event of ["models", "conversation"]) session.addEventListener(event, () => this._draw());
    this._draw();
  }

  show() {
    this._draw();
    byId("settings").showModal();
    byId("settings").scrollTop = 0;
    fitHeight(byId("system"));
  }

  _changeNumber(name, step, input) {
    if (step === 1 && input.value !== "") input.value = Math.round(input.valueAsNumber);
    this._showValidity(name, input);
    if (input.validity.valid) this._session.changeSettings({ [name]: input.value === "" ? "" : input.valueAsNumber });
  }

  _showValidity(name, input) {
    const isGood = input.validity.valid;
    const help = byId(`${input.id}-help`);
    const { help: words } = NUMBERS.find((number) => number.name === name);
    help.textContent = isGood ? words : input.validationMessage;
    help.classList.toggle("bad", !isGood);
    input.setAttribute("aria-invalid", String(!isGood));
  }

  _changeTools() {
    const text = byId("tools").value;
    let problem = "";
    try {
      parseTools(text);
    } catch (error) {
      if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
      problem = error.message;
    }
    this._showToolsProblem(problem);
    if (!problem) this._session.changeSettings({ tools: text });
  }

  _showToolsProblem(problem) {
    byId("tools-problem").textContent = problem;
    byId("tools").setAttribute("aria-invalid", String(Boolean(problem)));
  }

  _draw() {
    const { settings, model, conversation } = this._session;
    for (const { name } of NUMBERS) {
      const input = byId(`setting-${name}`);
      this._changeLimits(input, name, model);
      if (fill(input, settings[name])) this._showValidity(name, input);
    }
    fill(byId("system"), conversation.system);
    fill(byId("thinking"), settings.thinking);
    if (fill(byId("tools"), settings.tools)) this._showToolsProblem("");
    fill(byId("theme"), theme());
    byId("system-field").hidden = byId("tools-field").hidden = model !== null && !model.chat_template;
    byId("thinking-field").hidden = model === null || !canThink(model);
  }

  _changeLimits(input, name, model) {
    if (name !== "max_tokens" || model === null) return;
    input.max = model.max_tokens;
    input.placeholder = `up to ${model.max_tokens}`;
  }
}

/** Show a value in a field, unless the user is in it. Return whether it was shown. */
function fill(field, value) {
  if (document.activeElement === field) return false;
  field.value = value;
  return true;
}
