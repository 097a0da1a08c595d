/** The chat page of `deskside serve`: makes the parts and connects them. */

import { setApiKey } from "./api.js";
import { Composer } from "./composer.js";
import { Connection } from "./connection.js";
import { entered, show } from "./dialogs.js";
import { byId, make } from "./dom.js";
import { Session } from "./session.js";
import { SettingsDialog } from "./settings_dialog.js";
import { addShortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { Thread } from "./thread.js";

// Nothing fails unseen: not even what no part expects, such as a browser without room for another conversation.
function showProblem(error) {
  byId("problem").hidden = false;
  byId("problem-words").textContent = error?.message ?? String(error);
}
addEventListener("unhandledrejection", ({ reason }) => showProblem(reason));
addEventListener("error", ({ error, message }) => showProblem(error ?? message));
byId("reload").addEventListener("click", () => location.reload());

const connection = new Connection();
const session = new Session(connection);
const thread = new Thread(session);
const sidebar = new Sidebar(session);
const settingsDialog = new SettingsDialog(session);
new Composer(session);
addShortcuts(session, sidebar, settingsDialog);

let asksForKey = false;

connection.addEventListener("key", async () => {
  if (asksForKey) return;
  asksForKey = true;
  const text = "It is kept until this tab is closed.";
  // Other characters cannot be sent: a header of HTTP has none.
  const pattern = "\\s*[!-~]+\\s*";
  const key = await entered("This server asks for an API key", "API key", "", { type: "password", text, pattern });
  asksForKey = false;
  byId("key-needed").hidden = key !== null;
  if (key === null) return;
  setApiKey(key.trim());
  await session.recover();
});
byId("enter-key").addEventListener("click", () => session.loadModels());

function drawHeader() {
  const { conversation, models, model } = session;
  byId("title").textContent = conversation.title || "New chat";
  document.title = `${conversation.title || model?.id || "Chat"} – deskside`;
  byId("model").replaceChildren(...models.map(({ id }) => make("option", { value: id, text: id })));
  byId("model").value = model?.id ?? "";
  byId("model").hidden = models.length < 2;
  byId("only-model").hidden = models.length !== 1;
  byId("only-model").textContent = model?.id ?? "";
}

function keepAddress() {
  const { conversation } = session;
  const hash = conversation.leaf === null ? "" : `#${conversation.id}`;
  if (location.hash === hash) return;
  history.pushState(null, "", hash || location.pathname + location.search);
}

session.addEventListener("conversation", drawHeader);
session.addEventListener("conversation", keepAddress);
session.addEventListener("models", drawHeader);
byId("model").addEventListener("change", () => session.changeSettings({ model: byId("model").value }));
byId("open-settings").addEventListener("click", () => settingsDialog.show());
byId("open-shortcuts").addEventListener("click", () => show("shortcuts"));
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
}
addEventListener("pagehide", () => session.saveRunning());
addEventListener("popstate", () => openFromAddress());

/** Open the conversation that the address names, so that a reload and the browser's "back" find it again. */
async function openFromAddress() {
  const id = location.hash.slice(1);
  if (id === session.conversation.id) return;
  if (id && (await session.open(id))) return;
  history.replaceState(null, "", location.pathname + location.search);  // or "back" would return to this one
  session.newChat();
}

await openFromAddress();
await sidebar.load();
drawHeader();
thread.draw();
await session.loadModels();
byId("say").focus();
