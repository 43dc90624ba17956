// A block of code: its language, a button to copy it, and colours once it is complete.

import "./vendor/purify.min.js";
import hljs from "./vendor/highlight.min.js";
import { button, copyText, element } from "./dom.js";

const FILES = "bash c cpp diff go java javascript json python rust sql xml yaml".split(" ");
const ALIASES = {
  "c++": "cpp", cc: "cpp", console: "bash", h: "c", hpp: "cpp", html: "xml", js: "javascript", jsx: "javascript",
  jsonc: "json", patch: "diff", py: "python", python3: "python", rs: "rust", sh: "bash", shell: "bash", svg: "xml",
  ts: "javascript", tsx: "javascript", typescript: "javascript", yml: "yaml", zsh: "bash",
};
const MAX_COLOURED = 30_000; // characters
const CHUNK_LINES = 60;
const CHUNK_CHARACTERS = 4_000;
const SAFE = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true };
// Control characters of text direction: with them, code can look different from the code that runs.
const REORDERING = /[\u061C\u200E\u200F\u202A-\u202E\u2066-\u2069]/g;
const showReordering = (text) => text.replace(REORDERING, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** Return the code's elements with colours, or null if its language is unknown or the code is long. */
async function colour(text, language) {
  const name = ALIASES[language] ?? language;
  if (!FILES.includes(name) || text.length > MAX_COLOURED) return null;
  if (!hljs.getLanguage(name)) {
    const { default: grammar } = await import(`./vendor/languages/${name}.min.js`);
    hljs.registerLanguage(name, grammar);
  }
  const html = hljs.highlight(showReordering(text), { language: name, ignoreIllegals: true }).value;
  return /** @type {any} */ (globalThis).DOMPurify.sanitize(html, SAFE);
}

export class CodeBlock {
  /** @param {string} info the rest of the fence's line; its first word is the language */
  constructor(info) {
    this.language = info.trim().split(/\s/, 1)[0].toLowerCase().slice(0, 30);
    this.text = "";
    this.code = element("code", { dir: "ltr" });
    const copy = button("Copy", async () => {
      if (await copyText(this.text.replace(/\n$/, ""), "Code copied.")) copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    const bar = element("div", { class: "code-bar" }, element("span", { text: this.language || "code" }), copy);
    const pre = element("pre", { tabindex: "0", role: "region", "aria-label": `${this.language || "some"} code` }, this.code);
    this.node = element("div", { class: "code-block" }, bar, pre);
    this.chunk = null; // the last chunk, the only growing one; the others need no new layout
    this.chunkLines = 0;
  }

  append(text) {
    this.text += text;
    for (let start = 0; start < text.length; ) {
      if (!this.chunk || this.chunkLines >= CHUNK_LINES || this.chunk.length >= CHUNK_CHARACTERS) {
        this.chunk = document.createTextNode("");
        this.chunkLines = 0;
        this.code.append(element("span", { class: "chunk" }, this.chunk));
      }
      const lineEnd = text.indexOf("\n", start) + 1 || text.length;
      const end = Math.min(lineEnd, start + CHUNK_CHARACTERS);
      this.chunk.appendData(showReordering(text.slice(start, end)));
      this.chunkLines += end === lineEnd ? 1 : 0;
      start = end;
    }
    return this;
  }

  finish() {
    colour(this.text.replace(/\n$/, ""), this.language).then((coloured) => coloured && this.code.replaceChildren(coloured), () => {});
    return this;
  }
}
