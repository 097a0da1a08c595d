// The table of claims: sorting by its headings, and a row of details below each claim that a click unfolds.
const STATES = new WeakMap(); // of each mounted table: {sort, descending, opened, drawn}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) made[name] = value;
    else if (value !== false) made.setAttribute(name, value === true ? "" : value);
  made.append(...children);
  return made;
}

// A value is a list, of which the first part that differs decides. Rows without a value come last in either order.
function compare(x, y, descending) {
  if (x === null || y === null) return (x === null) - (y === null);
  for (const [i, part] of x.entries()) {
    const order = typeof part === "string" ? part.localeCompare(y[i], "en", { numeric: true }) : part - y[i];
    if (order) return descending ? -order : order;
  }
  return 0;
}

export default function ({ parentElement, data }) {
  const state = STATES.get(parentElement) ?? { sort: "verdict", descending: false, opened: new Set(), drawn: "" };
  STATES.set(parentElement, state);
  const root = parentElement.querySelector(".claims");

  function sortBy(key, descending) {
    Object.assign(state, { sort: key, descending });
    draw();
    root.querySelector(`[data-key="${key}"]`)?.focus();
  }

  function heading({ key, title }) {
    const active = state.sort === key;
    const order = active ? (state.descending ? "descending" : "ascending") : "none";
    return element("th", { scope: "col", class: key, "aria-sort": order },
      element("button", { type: "button", "data-key": key, onclick: () => sortBy(key, active && !state.descending) },
        title, element("span", { "aria-hidden": "true" }, active ? (state.descending ? " ↓" : " ↑") : "")));
  }

  function rows(claim) {
    const id = `details-${claim.id}`;
    const details = element("tr", { class: "details", id, hidden: !state.opened.has(claim.id) },
      element("td", { colspan: data.columns.length }, element("dl", {}, ...claim.details.flatMap(([name, text]) =>
        [element("dt", {}, name), element("dd", {}, text)]))));
    const button = element("button", { type: "button", "aria-controls": id,
      "aria-expanded": String(state.opened.has(claim.id)) }, claim.texts.claim);
    const toggle = () => {
      details.hidden = !details.hidden;
      details.hidden ? state.opened.delete(claim.id) : state.opened.add(claim.id);
      button.setAttribute("aria-expanded", String(!details.hidden));
    };
    const cells = data.columns.map(({ key, title }) => {
      if (key === "claim") return element("th", { scope: "row", class: key }, button);
      const chip = element("span", { class: "chip" }, claim.texts[key]);
      if (key === "verdict") [chip.style.color, chip.style.background] = data.colors[claim.kind];
      return element("td", { class: key, "data-label": title }, key === "verdict" ? chip : claim.texts[key]);
    });
    return [element("tr", { class: "claim", onclick: () => getSelection().isCollapsed && toggle() }, ...cells), details];
  }

  function draw() {
    const sorted = [...data.rows].sort((a, b) => compare(a.values[state.sort], b.values[state.sort], state.descending));
    const options = data.columns.map(({ key, title }) => element("option", { value: key, selected: key === state.sort }, title));
    root.replaceChildren(
      element("label", { class: "sort" }, "sort by ",
        element("select", { onchange: (event) => sortBy(event.target.value, false) }, ...options)),
      element("table", {}, element("thead", {}, element("tr", {}, ...data.columns.map(heading))),
        element("tbody", {}, ...sorted.flatMap(rows))));
  }

  const text = JSON.stringify(data);
  if (text !== state.drawn) draw(); // otherwise, what is selected and in focus stays
  state.drawn = text;
}
