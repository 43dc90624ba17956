// The list of chats: search, export and import.

import { exportChats, importChats } from "./chats.js";
import { button, byId, element, notify } from "./dom.js";
import { deleteChat, loadAllMessages, loadMessages, saveChat, saveMessages } from "./store.js";

const MAX_SHOWN = 300;

/** Offer a text to the user as a file to save. */
function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export class Sidebar {
  /** @param {{open(id: string): void, started(): void, removed(id: string): void, current(): string | undefined}} app */
  constructor(app) {
    this.app = app;
    this.chats = new Map();
    this.found = null; // ids of the chats with the searched words -> the place of the words
    this.list = byId("chats");
    byId("search").addEventListener("input", () => this.search());
    byId("export").addEventListener("click", () => this.export());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
  }

  put(chat) {
    this.chats.set(chat.id, chat);
    this.show();
  }

  show() {
    const chats = [...this.chats.values()].filter((chat) => !this.found || this.found.has(chat.id)).sort((a, b) => b.updated - a.updated);
    const items = chats.slice(0, MAX_SHOWN).map((chat) => this.makeItem(chat));
    if (!items.length) items.push(element("li", { class: "note", text: this.found ? "No chat has these words." : "No chats yet." }));
    this.list.replaceChildren(...items);
  }

  makeItem(chat) {
    const isCurrent = chat.id === this.app.current();
    const place = this.found?.get(chat.id);
    const open = button("", () => this.app.open(chat.id), { class: "chat", "aria-current": isCurrent && "true" });
    open.replaceChildren(element("bdi", { text: chat.title }), place ? element("small", { text: place }) : "");
    const rename = button(`Rename ${chat.title}`, () => this.rename(chat, item), { sign: "✎" });
    const remove = button(`Delete ${chat.title}`, () => this.remove(chat), { sign: "✕" });
    const item = element("li", {}, open, element("span", { class: "chat-actions" }, rename, remove));
    return item;
  }

  rename(chat, item) {
    const input = element("input", { value: chat.title, "aria-label": "Title of the chat", maxlength: "100" });
    const finish = (isSaved) => {
      if (isSaved && input.value.trim()) {
        chat.title = input.value.trim();
        saveChat(chat);
      }
      this.show();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") (event.stopPropagation(), finish(false));
    });
    input.addEventListener("blur", () => input.isConnected && finish(true));
    item.replaceChildren(input);
    input.select();
  }

  async remove(chat) {
    const messages = await loadMessages(chat.id);
    this.chats.delete(chat.id);
    this.show();
    await deleteChat(chat.id, messages.map((message) => message.id));
    this.app.removed(chat.id);
    const undo = async () => {
      await saveMessages(messages);
      await saveChat(chat);
      this.put(chat);
      this.app.open(chat.id);
    };
    notify(`“${chat.title}” is deleted.`, { label: "Undo", run: undo });
  }

  /** Show the chats with all searched words in title or messages. */
  async search() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      this.found = null;
      this.show();
      return;
    }
    const found = new Map();
    for (const chat of this.chats.values()) if (words.every((word) => chat.title.toLowerCase().includes(word))) found.set(chat.id, "");
    for (const { chat, content } of await loadAllMessages()) {
      const text = content.toLowerCase();
      if (found.get(chat) || !words.every((word) => text.includes(word))) continue;
      const at = text.indexOf(words[0]);
      found.set(chat, `…${content.slice(Math.max(0, at - 20), at + 40).replace(/\s+/g, " ")}…`);
    }
    if (words.join() !== byId("search").value.toLowerCase().split(/\s+/).filter(Boolean).join()) return; // the user has typed more
    this.found = found;
    this.show();
  }

  async export() {
    const chats = [];
    const messages = Map.groupBy(await loadAllMessages(), (message) => message.chat);
    for (const { id, title, leaf, settings } of this.chats.values()) {
      const kept = (messages.get(id) ?? []).sort((a, b) => a.created - b.created);
      chats.push({ title, leaf, settings, messages: kept.map(({ id, parent, role, content, thinking, calls, callId, finish }) => ({ id, parent, role, content, thinking, calls, callId, finish })) });
    }
    download("ovspec-chats.json", exportChats(chats));
    notify(`${chats.length} chat${chats.length === 1 ? " is" : "s are"} exported.`);
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const imported = importChats(await file.text());
      for (const { chat, messages } of imported) {
        await saveMessages(messages);
        await saveChat(chat);
        this.put(chat);
      }
      notify(`${imported.length} chat${imported.length === 1 ? " is" : "s are"} imported.`);
      if (imported.length) this.app.open(imported.at(-1).chat.id);
    } catch (error) {
      notify(error.message);
    }
  }
}
