/** Elements made by one call, and the icons of index.html. No text ever becomes markup here. */

/**
 * Return a new element.
 * attributes: `class`, `text` (its text), `on` ({event: listener}), or any attribute; true sets it empty, and false,
 * null and undefined leave it out.
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") listen(element, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function listen(element, listeners) {
  for (const [event, listener] of Object.entries(listeners)) element.addEventListener(event, listener);
}

/** Return an icon; its name is that of a symbol in index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** Return a button that shows an icon only; its label is read aloud and is its tooltip. */
export function iconButton(name, label, onClick, attributes = {}) {
  const own = { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: onClick } };
  return make("button", { ...own, ...attributes }, icon(name));
}

/** Return a button with an icon and text. */
export function textButton(name, label, onClick, attributes = {}) {
  return make("button", { type: "button", on: { click: onClick }, ...attributes }, icon(name), label);
}

export const byId = (id) => document.getElementById(id);

/** Say something to screen readers only. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Make a text area as high as its text; CSS limits how high. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

/** Copy a text, and show for a moment on the button that it was copied. */
export async function copyText(text, button) {
  await writeClipboard(text);
  button.classList.add("done");
  const shown = button.querySelector("use");
  shown.setAttribute("href", "#icon-check");
  announce("Copied");
  setTimeout(() => {
    button.classList.remove("done");
    shown.setAttribute("href", "#icon-copy");
  }, 1500);
}

async function writeClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers have this interface on https and localhost only, and the server may be reached by another name.
  const focused = document.activeElement;
  const area = make("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused.focus();
  if (!isCopied) throw new Error("The browser does not allow copying.");
}
