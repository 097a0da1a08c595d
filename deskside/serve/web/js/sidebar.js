/** The list of conversations: open, search, rename, delete, export and import. A drawer on a phone. */

import { byId, iconButton, make } from "./dom.js";
import { confirmed, entered } from "./dialogs.js";
import { listConversations, onOtherTabs, saveConversation } from "./store.js";
import { download, exported, imported } from "./transfer.js";

const DAY = 24 * 3600 * 1000;

export class Sidebar {
  constructor(session) {
    this._session = session;
    this._all = [];
    const redraw = () => this._draw();
    session.addEventListener("list", () => this.load());
    session.addEventListener("conversation", redraw);
    session.addEventListener("running", redraw);
    onOtherTabs(() => this.load());
    byId("search").addEventListener("input", redraw);
    byId("new").addEventListener("click", () => { session.newChat(); this.closeDrawer(); byId("say").focus(); });
    byId("menu").addEventListener("click", () => this.toggle());
    byId("scrim").addEventListener("click", () => this.closeDrawer());
    byId("export-all").addEventListener("click", () => download("deskside-conversations.json", exported(this._all)));
    byId("import").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => this._import());
    byId("delete-all").addEventListener("click", () => this._delete(this._all, "all conversations"));
    byId("sidebar").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this._isDrawer) return;
      event.stopPropagation();  // or it would stop the answer as well
      this.closeDrawer();
    });
    matchMedia("(max-width: 800px)").addEventListener("change", () => this._set(!this._isDrawer));
    this._set(!this._isDrawer);
  }

  get _isDrawer() {
    return matchMedia("(max-width: 800px)").matches;
  }

  /** Show or hide the list. */
  toggle() {
    this._set(document.body.classList.contains("without-sidebar"));
  }

  closeDrawer() {
    if (!this._isDrawer || document.body.classList.contains("without-sidebar")) return;
    this._set(false);
    byId("menu").focus();
  }

  _set(isOpen) {
    document.body.classList.toggle("without-sidebar", !isOpen);
    byId("menu").setAttribute("aria-expanded", String(isOpen));
    byId("sidebar").inert = !isOpen;
    byId("main").inert = isOpen && this._isDrawer;
    if (isOpen && this._isDrawer) byId("new").focus();
  }

  focusSearch() {
    this._set(true);
    byId("search").focus();
  }

  /** Read the conversations again. */
  async load() {
    this._all = await listConversations();
    this._draw();
  }

  _draw() {
    const words = byId("search").value.trim().toLowerCase();
    const found = this._all.filter((conversation) => matches(conversation, words));
    const list = byId("conversations");
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const groups = Map.groupBy(found, (conversation) => period(conversation.updated));
    list.replaceChildren(...[...groups].map(([name, members]) => make("section", { "aria-label": name },
      make("h3", { text: name }), make("ul", {}, ...members.map((conversation) => this._entry(conversation))))));
    if (focused) list.querySelector(`[data-key="${focused}"]`)?.focus();
    byId("no-conversations").hidden = found.length > 0;
    byId("no-conversations").textContent =
      words ? "No conversation has these words." : "Conversations are kept in this browser.";
    for (const id of ["export-all", "delete-all"]) byId(id).disabled = !this._all.length;
  }

  _entry(conversation) {
    const { id, title } = conversation;
    const isOpen = id === this._session.conversation.id;
    const open = async () => { await this._session.open(id); this.closeDrawer(); byId("say").focus(); };
    const save = () => download(`${fileName(title)}.json`, exported([conversation]));
    const remove = () => this._delete([conversation], `“${title}”`);
    return make("li", { class: isOpen ? "open" : "" },
      make("button", {
        type: "button", class: "title", text: title, title, "aria-current": isOpen ? "true" : null,
        "data-key": `${id} open`, on: { click: open },
      }),
      iconButton("edit", `Rename ${title}`, () => this._rename(conversation), { "data-key": `${id} rename` }),
      iconButton("download", `Export ${title}`, save, { "data-key": `${id} export` }),
      iconButton("trash", `Delete ${title}`, remove, { "data-key": `${id} delete` }));
  }

  async _rename(conversation) {
    const title = await entered("Rename the conversation", "Title", conversation.title);
    if (title !== null && title.trim()) await this._session.rename(conversation, title.trim());
  }

  async _delete(conversations, what) {
    if (!(await confirmed(`Delete ${what}?`, "This cannot be undone; an export keeps a copy.", "Delete"))) return;
    await this._session.remove(conversations.map(({ id }) => id));
    byId(this._isDrawer ? "new" : "say").focus();  // a drawer stays open, and keeps the focus
  }

  async _import() {
    const [file] = byId("file").files;
    byId("file").value = "";
    if (!file) return;
    let found;
    try {
      found = imported(await file.text());
    } catch (error) {
      if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
      await confirmed(`${file.name} cannot be imported`, error.message, null);
      return;
    }
    for (const conversation of found) await saveConversation(conversation);
    await this.load();
    await this._session.open(found[0].id);
    this.closeDrawer();
  }
}

function matches(conversation, words) {
  if (!words) return true;
  const texts = [conversation.title, ...Object.values(conversation.messages).map(({ content }) => content)];
  return texts.some((text) => text.toLowerCase().includes(words));
}

function period(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Previous 7 days" : "Older";
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
}
