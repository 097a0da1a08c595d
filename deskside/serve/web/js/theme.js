/** Light, dark, or as the system is. CSS does the rest, with light-dark(). */

const KEY = "deskside.theme";

/** Return "system", "light" or "dark". */
export function theme() {
  return localStorage.getItem(KEY) ?? "system";
}

export function setTheme(name) {
  if (name === "system") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, name);
  document.documentElement.dataset.theme = name;
}
