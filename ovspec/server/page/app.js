// The page: the open chat, and the actions of messages, fields and keys.

import { getJson, onKeyNeeded } from "./api.js";
import { newChat, newId, titleOf, toRequestMessages, Tree } from "./chats.js";
import { compare } from "./compare.js";
import { announce, byId, notify } from "./dom.js";
import { generate, newPart, sumTimings } from "./generation.js";
import { bindKeys, bindPanels } from "./controls.js";
import { ServerState } from "./server_state.js";
import { asksForJson, SettingsForm, toRequestFields } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { deleteMessages, loadChats, loadDetails, loadMessages, saveChat, saveDetails, saveMessages } from "./store.js";
import { Transcript } from "./transcript.js";

const INSIDE = "ovspec-inside";

const state = {
  /** @type {import("./chats.js").Chat} */ chat: newChat({}),
  tree: new Tree(),
  contextTokens: Infinity, // the model's context length
  running: null, // the answer in progress: {controller, message}
};

const actions = {
  showsInside: () => localStorage.getItem(INSIDE) === "true",
  rememberInside: (shows) => localStorage.setItem(INSIDE, String(shows)),
  loadParts: async (message) => (await loadDetails(message.id))?.parts ?? [],
  placeAmongBranches(message) {
    const siblings = state.tree.siblings(message);
    return { index: siblings.indexOf(message), count: siblings.length };
  },
  isAnswered: (call) => state.tree.path(state.chat.leaf).some((message) => message.callId === call.id),
  fillsContext: ({ finish, stats }) => finish === "length" && stats?.promptTokens + stats?.tokens >= state.contextTokens - 1,
  canContinue: (message) => !state.running && !actions.fillsContext(message) && message.id === state.chat.leaf && !message.calls?.length && message.content !== "" && !["stop", "tool_calls"].includes(message.finish),
  /** Return whether the last message is a question, or a tool's result, without an answer. */
  canTryAgain(message) {
    if (state.running || message.id !== state.chat.leaf || message.role === "assistant") return false;
    const calls = state.tree.path(message.id).flatMap((earlier) => earlier.calls ?? []);
    return message.role === "user" || calls.every(actions.isAnswered);
  },
  stop: () => state.running?.controller.abort(),

  showBranch(message, step) {
    const siblings = state.tree.siblings(message);
    const other = siblings[siblings.indexOf(message) + step];
    if (!other || isBusy()) return;
    showLeaf(state.tree.newestLeaf(other.id));
    transcript.view(other.id)?.node.focus();
  },

  regenerate(message) {
    if (!isBusy()) answer(message.parent);
  },

  tryAgain(message) {
    if (!isBusy()) answer(message.id);
  },

  /** Make a branch with another text; return false if the page is busy. */
  edit(message, text) {
    if (isBusy()) return false;
    const branch = { ...makeMessage(message.role, message.parent, text), thinking: message.thinking };
    addMessage(branch);
    if (message.role === "user") answer(branch.id);
    else showLeaf(branch.id);
    return true;
  },

  remove(message) {
    if (isBusy()) return;
    const { leaf } = state.chat;
    const siblings = state.tree.siblings(message);
    const neighbour = siblings[siblings.indexOf(message) - 1] ?? siblings[siblings.indexOf(message) + 1];
    const removed = state.tree.remove(message.id);
    const details = Promise.all(removed.map(({ id }) => loadDetails(id)));
    details.then(() => deleteMessages(removed.map(({ id }) => id)));
    showLeaf(neighbour ? state.tree.newestLeaf(neighbour.id) : message.parent);
    const { chat } = state;
    const undo = async () => {
      await saveMessages(removed);
      for (const entry of await details) if (entry) await saveDetails(entry);
      chat.leaf = leaf;
      await saveChat(chat);
      openChat(chat.id);
    };
    notify(removed.length > 1 ? `${removed.length} messages are deleted.` : "The message is deleted.", { label: "Undo", run: undo });
  },

  continueAnswer(message) {
    if (!isBusy()) extend(message);
  },

  answerCall(message, call, text) {
    if (isBusy()) return;
    const result = { ...makeMessage("tool", state.chat.leaf, text), callId: call.id };
    addMessage(result);
    const answered = new Set(state.tree.path(result.id).map(({ callId }) => callId));
    if (message.calls.every(({ id }) => answered.has(id))) answer(result.id);
    else showLeaf(result.id);
    transcript.refresh(message.id);
  },

  async compare(message) {
    const details = await loadDetails(message.id);
    const body = details?.body ?? toRequestFields(state.chat.settings);
    const seed = details?.parts[0]?.record?.options.seed;
    const messages = toRequestMessages(state.tree.path(message.parent), details?.system ?? state.chat.settings.system ?? "");
    const speedup = await compare({ ...body, ...(seed !== undefined && { seed }), messages });
    if (!speedup) return;
    message.speedup = speedup;
    await saveMessages([message]);
    transcript.refresh(message.id);
  },

  async verify(message) {
    const parts = await actions.loadParts(message);
    if (!parts.length) return { ok: false, sentence: "Nothing is known of how this text came about; generate it again." };
    try {
      let exact = 0;
      for (const part of parts) {
        if (!part.record) throw new Error(parts.length > 1 ? "An answer that was stopped and continued can't be verified; regenerate it." : "A stopped answer can't be verified; regenerate it.");
        const choice = { message: { content: part.content }, record: part.record };
        const verdict = await getJson("verify", { body: { choice } });
        if (!verdict.ok) return { ok: false, sentence: describeWrong(verdict, part) };
        exact += verdict.exact;
      }
      return { ok: true, sentence: `Verified: each of the ${exact} tokens is the model's own choice.` };
    } catch (error) {
      return { ok: false, sentence: error.message };
    }
  },
};

function describeWrong({ exact, tokens, problem }, part) {
  if (problem) return `Not verified: ${problem}.`;
  const wrong = part.tokens[exact];
  return `Not verified: token ${exact + 1} of ${tokens}${wrong ? `, ${JSON.stringify(wrong.text)},` : ""} isn't the model's choice.`;
}

function isBusy() {
  if (state.running) notify("An answer is being generated; stop it first.", { label: "Stop", run: actions.stop });
  return state.running !== null;
}

function makeMessage(role, parent, content) {
  return { id: newId(), chat: state.chat.id, parent, role, content, created: Date.now() };
}

function addMessage(message) {
  state.tree.add(message);
  state.chat.leaf = message.id;
  saveMessages([message]).catch(reportStorage);
}

function reportStorage(error) {
  notify(`The browser doesn't keep this chat (${error?.name ?? "storage"}); export it before you leave.`);
}

function showLeaf(leaf) {
  state.chat.leaf = leaf;
  transcript.show(state.tree.path(leaf));
  saveCurrentChat();
}

function saveCurrentChat() {
  if (!state.tree.byId.size && !sidebar.chats.has(state.chat.id)) return;
  state.chat.updated = Date.now();
  saveChat(state.chat).catch(reportStorage);
  sidebar.put(state.chat);
  byId("title").textContent = state.chat.title;
}

// ---------------------------------------------------------------- answering

function showError(error) {
  const isSetting = settingsForm.showError(error, false);
  if (isSetting) {
    panels.open("settings");
    settingsForm.showError(error);
  }
  byId("composer-error").textContent = isSetting ? `A setting can't be used: ${error.message}` : error.message;
}

/** Send the text of the message field. */
function submit() {
  const input = byId("input");
  const text = input.value.trim();
  if (!text || isBusy()) return;
  try {
    toRequestFields(state.chat.settings);
  } catch (error) {
    showError(error);
    return;
  }
  const message = makeMessage("user", state.chat.leaf, text);
  if (!state.tree.byId.size) state.chat.title = titleOf(text);
  input.value = "";
  addMessage(message);
  transcript.follows = true;
  answer(message.id);
}

/** Generate an answer after a message. */
function answer(parent) {
  const message = makeMessage("assistant", parent, "");
  message.isJson = asksForJson(state.chat.settings);
  runRequest(message, parent, []);
}

/** Continue an answer. */
function extend(message) {
  runRequest(message, message.id, actions.loadParts(message));
}

/** Generate a part of an answer: the whole answer, or its continuation. */
async function runRequest(message, lastId, earlierParts) {
  const isNew = message.content === "";
  const { settings } = state.chat;
  const path = state.tree.path(lastId);
  byId("composer-error").textContent = "";
  settingsForm.clearErrors();
  let body;
  try {
    body = toRequestFields(settings);
    if (!isNew && settings.format) body.constrain_from = -[...message.content].length;
  } catch (error) {
    showError(error);
    showLeaf(state.chat.leaf);
    return;
  }
  const { chat, tree } = state;
  const messages = toRequestMessages(path, settings.system ?? "");
  const before = { content: message.content, thinking: message.thinking ?? "" };
  if (isNew) {
    state.tree.add(message);
    state.chat.leaf = message.id;
  }
  delete message.error;
  const part = newPart();
  const controller = new AbortController();
  state.running = { controller, message };
  showBusy(true);
  showLeaf(message.id);
  const allParts = [...(await earlierParts), part];
  const view = transcript.view(message.id);
  view.beginGrowth(allParts, message.isJson);
  transcript.goToEnd();
  announce("The model answers.");
  const takePart = () => {
    message.content = before.content + part.content;
    message.thinking = before.thinking + part.thinking;
    if (part.calls.length) message.calls = part.calls.filter(Boolean);
  };
  let failure = null;
  try {
    await generate({ ...body, messages }, part, controller.signal, () => {
      takePart();
      transcript.scheduleGrowth(view);
    });
  } catch (error) {
    failure = error;
  }
  takePart();
  message.finish = part.finish;
  message.schemaErrors = part.schemaErrors;
  message.stats = sumTimings(allParts);
  delete message.speedup;
  const endRun = () => {
    state.running = null;
    showBusy(false);
  };
  if (failure) {
    if (state.chat === chat) showError(failure);
    if (isNew && !part.tokens.length) {
      endRun();
      tree.remove(message.id);
      chat.leaf = lastId;
      saveChat(chat);
      if (state.chat === chat) showLeaf(lastId);
      return;
    }
    message.error = failure.message;
  }
  await transcript.finishGrowth(view);
  endRun();
  view.showActions();
  announce(failure ? failure.message : `The answer is whole: ${message.content.slice(0, 400)}`);
  if (!sidebar.chats.has(chat.id)) return; // the chat was deleted meanwhile
  await saveMessages([message]).catch(reportStorage);
  await saveDetails({ id: message.id, parts: allParts, body, system: settings.system ?? "" }).catch(reportStorage);
  if (state.chat === chat) saveCurrentChat();
  for (const { id } of path) transcript.refresh(id);
}

function showBusy(isRunning) {
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
}

// ---------------------------------------------------------------- chats

let wantedChat = null;

async function openChat(id) {
  if (state.running) actions.stop();
  const chat = sidebar.chats.get(id);
  if (!chat) return;
  wantedChat = id;
  const messages = await loadMessages(id);
  if (wantedChat !== id) return; // another chat was opened meanwhile
  state.chat = chat;
  state.tree = new Tree(messages);
  if (!state.tree.byId.has(chat.leaf)) chat.leaf = state.tree.newestLeaf(null);
  showChat();
}

function startChat() {
  if (state.running) actions.stop();
  wantedChat = null;
  state.chat = newChat({}); // with the server's defaults
  state.tree = new Tree();
  showChat();
  byId("input").focus();
}

function showChat() {
  byId("title").textContent = state.chat.title;
  byId("composer-error").textContent = "";
  settingsForm.show(state.chat.settings);
  transcript.show(state.tree.path(state.chat.leaf));
  transcript.goToEnd();
  sidebar.show();
  panels.closeSidebar();
}

// ---------------------------------------------------------------- the page

const transcript = new Transcript(actions);
const sidebar = new Sidebar({
  open: openChat,
  removed: (id) => id === state.chat.id && startChat(),
  current: () => state.chat.id,
});
const settingsForm = new SettingsForm(byId("settings"), () => {
  byId("composer-error").textContent = "";
  if (sidebar.chats.has(state.chat.id)) saveChat(state.chat).catch(reportStorage);
});
const serverState = new ServerState(byId("server-state"));
const panels = bindPanels({
  onSettings: () => settingsForm.describe().catch(() => {}),
  onServer: (isOpen) => (isOpen ? serverState.open() : serverState.close()),
});

onKeyNeeded(
  (wrong) =>
    new Promise((resolve) => {
      const dialog = byId("key-dialog");
      if (wrong) byId("key-note").textContent = "The server doesn't know this key; give another one.";
      byId("key").value = "";
      dialog.returnValue = "";
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok" ? byId("key").value.trim() : null), { once: true });
      dialog.showModal();
    }),
);

byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", actions.stop);
byId("new-chat").addEventListener("click", startChat);
bindKeys({ submit, stop: actions.stop, startChat, transcript, panels, isRunning: () => state.running !== null });

/** Ask the server about itself, repeatedly while it prepares its model. */
async function greet() {
  try {
    const ready = await fetch("ready").then((response) => response.json());
    if (ready.status === "preparing") {
      byId("model").textContent = `the model is being prepared: ${ready.progress}`;
      setTimeout(greet, 2_000);
      return;
    }
    settingsForm.offerDrafters(ready.drafters);
    const models = await getJson("v1/models");
    state.contextTokens = models.data[0].max_model_len ?? Infinity;
    byId("model").textContent = models.data[0].id;
    document.title = `${models.data[0].id} – ovspec`;
  } catch (error) {
    byId("composer-error").textContent = error.message;
  }
}

settingsForm.show(state.chat.settings);
greet();
try {
  for (const chat of await loadChats()) sidebar.chats.set(chat.id, chat);
} catch (error) {
  reportStorage(error);
}
sidebar.show();
