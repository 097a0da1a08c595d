/** Questions in modal dialogs, which keep the focus within them and close on Esc. */

import { byId, make } from "./dom.js";

function ask(title, parts, buttons, field = null) {
  return new Promise((resolve) => {
    const heading = make("h2", { id: "ask-title", text: title });
    const form = make("form", { method: "dialog" }, heading, ...parts, make("div", { class: "row" }, ...buttons));
    const dialog = make("dialog", { "aria-labelledby": "ask-title", class: "ask-dialog" }, form);
    const end = (answer) => {
      dialog.close();
      dialog.remove();
      resolve(answer);
    };
    dialog.addEventListener("close", () => end(""));  // by Esc or the button that cancels
    // The event "close" comes later than the click, and so perhaps after what the user does next.
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      end(event.submitter.value);
    });
    document.body.append(dialog);
    dialog.showModal();
    field?.focus();
  });
}

const button = (value, text, kind = "") => make("button", { value, text, class: kind });
// The first submit button is what Enter presses, so those that cancel are no submit buttons.
const cancelButton = (text = "Cancel") =>
  make("button", { type: "button", text, on: { click: (event) => event.target.closest("dialog").close("") } });

/** Ask a question; without `yes`, only tell something. Return whether the answer was yes. */
export async function confirmed(title, text, yes) {
  const buttons = yes ? [cancelButton(), button("yes", yes, "danger")] : [cancelButton("Close")];
  return (await ask(title, [make("p", { text })], buttons)) === "yes";
}

/** Ask for a text, which the regular expression `pattern` must match. Return null if the user cancels. */
export async function entered(title, label, value, { type = "text", text = "", pattern = null } = {}) {
  const input = make("input", { type, autocomplete: "off", required: true, pattern });
  input.value = value;
  const parts = [text ? make("p", { text }) : null, make("label", { text: label }, input)].filter(Boolean);
  const answer = await ask(title, parts, [cancelButton(), button("yes", "OK", "main")], input);
  return answer === "yes" ? input.value : null;
}

/** Show a dialog of index.html. */
export function show(id) {
  if (!byId(id).open) byId(id).showModal();
}
