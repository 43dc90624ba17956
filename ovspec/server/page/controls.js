// Panels, the theme, and the keyboard.

import { byId, element } from "./dom.js";

const THEME = "ovspec-theme";
const THEMES = ["auto", "light", "dark"];

/** Wire the panel on the right and the list of chats on the left. */
export function bindPanels({ onSettings, onServer }) {
  const tabs = ["settings", "server"];
  let described = false;
  let opener = null;

  function open(name) {
    if (byId("panel").hidden) opener = document.activeElement;
    byId("panel").hidden = false;
    for (const tab of tabs) {
      const isShown = tab === name;
      byId(tab).hidden = !isShown;
      byId(`tab-${tab}`).setAttribute("aria-selected", String(isShown));
      byId(`tab-${tab}`).tabIndex = isShown ? 0 : -1;
      byId(`show-${tab}`).setAttribute("aria-expanded", String(isShown));
    }
    if (name === "settings" && !described) {
      described = true;
      onSettings();
    }
    onServer(name === "server");
  }

  function close() {
    byId("panel").hidden = true;
    for (const tab of tabs) byId(`show-${tab}`).setAttribute("aria-expanded", "false");
    onServer(false);
    opener?.focus();
  }

  function toggle(name) {
    if (!byId("panel").hidden && !byId(name).hidden) return close();
    open(name);
    return byId(`tab-${name}`).focus();
  }

  function setSidebar(isOpen) {
    document.body.classList.toggle("with-sidebar", isOpen);
    byId("toggle-sidebar").setAttribute("aria-expanded", String(isOpen));
    byId("shade").hidden = !isOpen;
    if (isOpen) byId("new-chat").focus();
  }

  for (const tab of tabs) {
    byId(`show-${tab}`).addEventListener("click", () => toggle(tab));
    byId(`tab-${tab}`).addEventListener("click", () => open(tab));
    byId(`tab-${tab}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[1 - tabs.indexOf(tab)];
      open(other);
      byId(`tab-${other}`).focus();
    });
  }
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("close-panel").addEventListener("click", close);
  byId("toggle-sidebar").addEventListener("click", () => setSidebar(!document.body.classList.contains("with-sidebar")));
  byId("shade").addEventListener("click", () => setSidebar(false));
  bindTheme();
  return { open, close, toggle, closeSidebar: () => setSidebar(false) };
}

/** Wire the buttons for the theme: at the top, and below the chats on a phone. */
function bindTheme() {
  const buttons = document.querySelectorAll("button.theme");
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    for (const button of buttons) button.textContent = `Theme: ${theme}`;
  };
  show(localStorage.getItem(THEME) ?? "auto");
  const showNext = () => {
    const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem(THEME, theme);
    show(theme);
  };
  for (const button of buttons) button.addEventListener("click", showNext);
}

/** Make the message field grow with its text. */
function fitInput(input) {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight + 2, innerHeight * 0.4)}px`;
}

export function bindKeys({ submit, stop, startChat, transcript, panels, isRunning }) {
  const input = byId("input");
  const showKeys = () => byId("keys").showModal();
  const shortcuts = {
    n: ["New chat", startChat],
    f: ["Search chats", () => (document.body.classList.contains("with-sidebar") || byId("toggle-sidebar").offsetParent === null || byId("toggle-sidebar").click(), byId("search").focus())],
    i: ["To the message field", () => input.focus()],
    s: ["Settings", () => panels.toggle("settings")],
    m: ["Server", () => panels.toggle("server")],
    j: ["Next message", () => transcript.focusNeighbour(1)],
    u: ["Previous message", () => transcript.focusNeighbour(-1)],
    k: ["This list", showKeys],
  };
  const lines = [
    ["Enter", "Send"],
    ["Shift+Enter", "New line"],
    ["Escape", "Stop the answer, close what is open"],
    ["↑ in an empty field", "Edit the last message"],
    ["Tab, then ← and →", "Go through the tokens of an opened answer"],
    ...Object.entries(shortcuts).map(([key, [name]]) => [`Alt+${key.toUpperCase()}`, name]),
  ];
  byId("keys-list").append(...lines.flatMap(([keys, name]) => [element("dt", {}, element("kbd", { text: keys })), element("dd", { text: name })]));
  byId("show-keys").addEventListener("click", showKeys);

  input.addEventListener("input", () => fitInput(input));
  byId("composer").addEventListener("submit", () => fitInput(input));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
      fitInput(input);
    }
    if (event.key === "ArrowUp" && !input.value) {
      const edit = [...document.querySelectorAll(".message.user")].at(-1)?.querySelector(".actions .edit");
      if (edit) (event.preventDefault(), edit.click());
    }
  });
  document.addEventListener("keydown", (event) => {
    const shortcut = event.altKey && !event.ctrlKey && !event.metaKey && shortcuts[event.code.replace("Key", "").toLowerCase()];
    if (shortcut && !document.querySelector("dialog[open]")) {
      event.preventDefault();
      shortcut[1]();
    } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (isRunning()) stop();
      else if (document.body.classList.contains("with-sidebar")) panels.closeSidebar();
      else if (!byId("panel").hidden) panels.close();
    }
  });
}
