/** Conversations in this browser's IndexedDB. Other tabs of the page are told of every change. */

const NAME = "conversations";
const channel = new BroadcastChannel("deskside");
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("deskside-chat", 1);
    request.onupgradeneeded = () => request.result.createObjectStore(NAME, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

async function inTransaction(mode, work) {
  const transaction = (await database()).transaction(NAME, mode);
  return new Promise((resolve, reject) => {
    let result;
    transaction.oncomplete = () => resolve(result);
    transaction.onabort = () => reject(transaction.error);
    work(transaction.objectStore(NAME), (value) => { result = value; });
  });
}

/** Return all conversations, the newest first. */
export async function listConversations() {
  const found = await inTransaction("readonly", (store, give) => {
    const request = store.getAll();
    request.onsuccess = () => give(request.result);
  });
  return found.sort((a, b) => b.updated - a.updated);
}

/** Return a conversation, or undefined. */
export function getConversation(id) {
  return inTransaction("readonly", (store, give) => {
    const request = store.get(id);
    request.onsuccess = () => give(request.result);
  });
}

/**
 * Save a conversation. Messages that another tab has added to it are kept, because messages are never removed; the
 * other fields are those of the last that saved.
 */
export async function saveConversation(conversation) {
  await inTransaction("readwrite", (store) => {
    const request = store.get(conversation.id);
    request.onsuccess = () => {
      const messages = { ...request.result?.messages, ...conversation.messages };
      store.put({ ...conversation, messages });
    };
  });
  channel.postMessage(conversation.id);
}

/** Delete conversations. */
export async function removeConversations(ids) {
  await inTransaction("readwrite", (store) => ids.forEach((id) => store.delete(id)));
  channel.postMessage(null);
}

/** Call `listener` when another tab has saved or deleted conversations. */
export function onOtherTabs(listener) {
  channel.addEventListener("message", listener);
}
