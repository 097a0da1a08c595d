// Three buttons: the system's theme, light, dark. Streamlit reads the choice from localStorage when a page is loaded.
const CHOICES = [
  ["System", "Theme of the system", "M3 4h18v12H3zM9 20h6M12 16v4"],
  ["Light", "Light theme",
    "M12 7.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 1 0 0-9M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M19 5l-1.4 1.4M6.4 17.6L5 19"],
  ["Dark", "Dark theme", "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z"],
];
const storageKey = (path) => `stActiveTheme-/${path}-v2`;

function icon(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.appendChild(document.createElementNS(svg.namespaceURI, "path")).setAttribute("d", path);
  return svg;
}

export default function ({ parentElement, data }) {
  const stored = localStorage.getItem(storageKey(location.pathname.slice(1)));
  const chosen = stored === null ? "System" : JSON.parse(stored);
  const group = parentElement.querySelector(".switch");
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "theme");
  group.replaceChildren(...CHOICES.map(([name, label, path]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = label;
    button.setAttribute("aria-label", label);
    button.setAttribute("aria-pressed", String(name === chosen));
    button.append(icon(path));
    button.onclick = () => {
      for (const page of data.paths) localStorage.setItem(storageKey(page), JSON.stringify(name));
      location.reload();
    };
    return button;
  }));
}
