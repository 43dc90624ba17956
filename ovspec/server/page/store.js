// Chats in the browser's storage: a record per chat and per message, and separate records for the view "Inside".

const NAME = "ovspec";
const STORES = ["chats", "messages", "details"];
let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      const database = request.result;
      database.createObjectStore("chats", { keyPath: "id" });
      database.createObjectStore("messages", { keyPath: "id" }).createIndex("chat", "chat");
      database.createObjectStore("details", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

/** Run `work` with the stores; return the result of the database request it returns. */
async function transact(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORES, mode);
    const [chats, messages, details] = STORES.map((name) => transaction.objectStore(name));
    const request = work({ chats, messages, details });
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export const loadChats = () => transact("readonly", ({ chats }) => chats.getAll());
export const loadAllMessages = () => transact("readonly", ({ messages }) => messages.getAll());
export const loadMessages = (chat) => transact("readonly", ({ messages }) => messages.index("chat").getAll(chat));
export const loadDetails = (id) => transact("readonly", ({ details }) => details.get(id));
export const saveChat = (chat) => transact("readwrite", ({ chats }) => chats.put(chat));
export const saveDetails = (details) => transact("readwrite", (stores) => stores.details.put(details));

export function saveMessages(added) {
  return transact("readwrite", ({ messages }) => {
    for (const message of added) messages.put(message);
  });
}

export function deleteMessages(ids) {
  return transact("readwrite", ({ messages, details }) => {
    for (const id of ids) {
      messages.delete(id);
      details.delete(id);
    }
  });
}

export function deleteChat(chat, ids) {
  return transact("readwrite", ({ chats, messages, details }) => {
    chats.delete(chat);
    for (const id of ids) {
      messages.delete(id);
      details.delete(id);
    }
  });
}
