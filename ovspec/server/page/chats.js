// Chats as trees of messages: an edited or regenerated message is a branch beside the old message.

/**
 * @typedef {object} Message
 * @property {string} id
 * @property {string} chat
 * @property {string | null} parent
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {string} [thinking]
 * @property {{id: string, type: "function", function: {name: string, arguments: string}}[]} [calls]
 * @property {string} [callId] for a tool's result, the id of its call
 * @property {number} created
 * @property {string | null} [finish] why an answer ended; "stopped" by the user
 * @property {string} [error]
 * @property {object} [stats] the counts and times of its last part
 * @property {number} [speedup]
 *
 * @typedef {object} Chat
 * @property {string} id
 * @property {string} title
 * @property {number} created
 * @property {number} updated
 * @property {string | null} leaf the last message of the shown branch
 * @property {object} settings
 */

export const newId = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** @returns {Chat} */
export function newChat(settings) {
  const now = Date.now();
  return { id: newId(), title: "New chat", created: now, updated: now, leaf: null, settings: structuredClone(settings) };
}

/** The messages of a chat. */
export class Tree {
  /** @param {Message[]} messages */
  constructor(messages = []) {
    this.byId = new Map();
    this.children = new Map([[null, []]]);
    for (const message of messages) this.byId.set(message.id, message);
    for (const message of messages.sort((a, b) => a.created - b.created)) {
      if (message.parent !== null && !this.byId.has(message.parent)) message.parent = null;
      this.addChild(message);
    }
  }

  addChild(message) {
    if (!this.children.has(message.parent)) this.children.set(message.parent, []);
    this.children.get(message.parent).push(message);
  }

  add(message) {
    this.byId.set(message.id, message);
    this.addChild(message);
  }

  /** Return the messages from the first to `leaf`. */
  path(leaf) {
    const messages = [];
    for (let message = this.byId.get(leaf); message; message = this.byId.get(message.parent)) messages.push(message);
    return messages.reverse();
  }

  /** Return the messages with the same parent, including this message. */
  siblings(message) {
    return this.children.get(message.parent) ?? [];
  }

  /** Return the last message of the newest branch below a message. */
  newestLeaf(id) {
    let leaf = id;
    for (let below = this.children.get(leaf); below?.length; below = this.children.get(leaf)) leaf = below.at(-1).id;
    return leaf;
  }

  /** Remove a message and all below it; return them. */
  remove(id) {
    const removed = [];
    const waiting = [id];
    while (waiting.length) {
      const message = this.byId.get(waiting.pop());
      removed.push(message);
      waiting.push(...(this.children.get(message.id) ?? []).map((child) => child.id));
    }
    const top = removed[0];
    this.children.set(top.parent, this.siblings(top).filter((sibling) => sibling !== top));
    for (const message of removed) {
      this.byId.delete(message.id);
      this.children.delete(message.id);
    }
    return removed;
  }
}

/** Return the messages to send to a model, for a path of a chat. */
export function toRequestMessages(path, system) {
  const messages = path.map((message) => {
    if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
    if (message.role === "user") return { role: "user", content: message.content };
    const answer = { role: "assistant", content: message.content };
    if (message.thinking) answer.reasoning_content = message.thinking;
    if (message.calls?.length) answer.tool_calls = message.calls;
    return answer;
  });
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

/** Return a title for a chat, from its first text. */
export function titleOf(text) {
  const line = text.replace(/[\u0000-\u001f\u061C\u200E\u200F\u202A-\u202E\u2066-\u2069\s]+/g, " ").trim();
  const characters = [...line];
  return characters.length > 60 ? `${characters.slice(0, 59).join("")}…` : line || "New chat";
}

const FORMAT = "ovspec-chats";

/** Return chats with their messages as the text of a file. */
export function exportChats(chats) {
  return JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);
}

const isText = (value) => typeof value === "string";

/** Return the chats in a file, with new ids; throws Error, with a sentence, if it isn't a file of chats. */
export function importChats(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("The file isn't JSON; choose one that this page exported.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.chats)) throw new Error("The file has no chats; choose one that this page exported.");
  return data.chats.map((entry) => {
    const ids = new Map();
    const chat = { ...newChat({}), title: titleOf(isText(entry.title) ? entry.title : ""), settings: toSettings(entry.settings) };
    const messages = (Array.isArray(entry.messages) ? entry.messages : []).map((message, index) => {
      if (!["user", "assistant", "tool"].includes(message?.role) || !isText(message.content)) {
        throw new Error(`Message ${index + 1} of a chat in the file has no role or content.`);
      }
      const id = newId();
      ids.set(message.id, id);
      const copy = { id, chat: chat.id, parent: message.parent ?? null, role: message.role, content: message.content, created: index };
      for (const name of ["thinking", "callId", "finish"]) if (isText(message[name])) copy[name] = message[name];
      const calls = Array.isArray(message.calls) ? message.calls : [];
      copy.calls = calls.filter((call) => isText(call?.function?.name) && isText(call.function.arguments));
      return copy;
    });
    for (const message of messages) message.parent = ids.get(message.parent) ?? null;
    chat.leaf = ids.get(entry.leaf) ?? messages.at(-1)?.id ?? null;
    return { chat, messages };
  });
}

function toSettings(settings) {
  const entries = Object.entries(settings && typeof settings === "object" ? settings : {});
  return Object.fromEntries(entries.filter(([, value]) => ["string", "boolean"].includes(typeof value)));
}
