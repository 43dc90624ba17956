// Markdown to elements. A model's text is hostile until DOMPurify has cleaned it; images and unknown HTML stay text.

import "./vendor/purify.min.js";
import { Marked } from "./vendor/marked.esm.js";
import { CodeBlock } from "./code_block.js";
import { element } from "./dom.js";

const PLAIN_HTML = /^<\/?(?:b|br|em|i|kbd|mark|s|small|strong|sub|sup|u)\s*\/?>$/i;
const SAFE = {
  ALLOWED_TAGS: [
    ..."a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i input kbd li mark ol p pre s small strong".split(" "),
    ..."sub sup table tbody td th thead tr u ul".split(" "),
  ],
  ALLOWED_ATTR: ["align", "checked", "disabled", "href", "start", "type"],
  ADD_URI_SAFE_ATTR: ["align", "checked", "disabled", "start", "type"],
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const MAX_TAIL = 12_000; // maximum characters of the growing block; a longer block is cut at a line break
const MAX_LINE = 3_000; // the same for text without a line break
const FENCE = /^( {0,3})(`{3,}|~{3,})([^\n]*)\n/;
const LINK_DEFINITION = /^ {0,3}\[[^\]]+\]:/m;
const MAX_FINAL = 40_000; // maximum characters of a text rendered as a whole
const STEP_MS = 8; // milliseconds per frame of 16

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escape = (text) => text.replace(/[&<>"]/g, (character) => escapes[character]);

const marked = new Marked({
  breaks: true,
  gfm: true,
  renderer: {
    html: ({ text }) => (PLAIN_HTML.test(text.trim()) ? text : escape(text)),
    image({ href, text }) {
      return `<a href="${escape(href)}">image: ${escape(text || href)}</a>`; // never loaded: it would track the reader
    },
  },
});

/** Return the elements of HTML after DOMPurify. */
function makeSafe(html) {
  const fragment = /** @type {any} */ (globalThis).DOMPurify.sanitize(html, SAFE);
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes);
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
    link.title = link.href; // show the real target, because a link's text may lie
  }
  for (const box of fragment.querySelectorAll("input")) {
    if (box.type !== "checkbox") box.remove();
    box.disabled = true;
    box.setAttribute("aria-label", "done");
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroller = element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  for (const block of fragment.children) block.dir = "auto";
  return fragment;
}

/** Return the elements of a token of marked, the Markdown parser. */
function renderToken(token, links) {
  if (token.type === "space" || token.type === "def") return [];
  if (token.type === "code") return [new CodeBlock(token.lang ?? "").append(token.text).finish().node];
  const tokens = Object.assign([token], { links });
  try {
    return [makeSafe(marked.parser(tokens))];
  } catch {
    return [element("p", { text: token.raw })];
  }
}

/** Return marked's tokens; a text it can't parse is a single paragraph. */
function lex(text) {
  try {
    return marked.lexer(text);
  } catch {
    return Object.assign([{ type: "paragraph", raw: text, text, tokens: [{ type: "text", raw: text, text }] }], { links: {} });
  }
}

/** Return the elements of a whole text. */
function renderWhole(text) {
  const tokens = lex(text.replace(/\r\n?/g, "\n"));
  return tokens.flatMap((token) => renderToken(token, tokens.links));
}

/** Show a text in an element; a long text frame by frame. */
export function showMarkdown(root, text) {
  if (text.length <= MAX_FINAL) {
    root.replaceChildren(...renderWhole(text));
    return;
  }
  const growing = new GrowingMarkdown(root);
  const step = () => (growing.update(text) ? growing.finish() : requestAnimationFrame(step));
  step();
}

/**
 * A growing text. Only its last block is rendered again; a code block only gets the new text, and colours at its end.
 * A long unfinished block is cut, so no step takes long.
 */
export class GrowingMarkdown {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    this.text = "";
    this.done = 0; // characters in finished blocks
    this.tail = [];
    this.wasCut = false;
    this.fence = null;
  }

  /** Show `text`, which begins with the earlier text; return false if the frame's time ends before all of it is shown. */
  update(text) {
    this.text = text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
    const deadline = performance.now() + STEP_MS;
    for (;;) {
      if (performance.now() > deadline) return false;
      if (this.fence && !this.growFence()) return true;
      const rest = this.text.slice(this.done, this.done + 2 * MAX_TAIL);
      const fence = FENCE.exec(rest);
      if (fence) {
        this.beginFence(fence);
        continue;
      }
      if (!this.growTail(rest)) return true;
    }
  }

  /** At the end of the text, render it again if a block was cut. */
  finish() {
    this.fence?.block.finish();
    if ((this.wasCut || LINK_DEFINITION.test(this.text)) && this.text.length < MAX_FINAL) {
      this.root.replaceChildren(...renderWhole(this.text));
    }
  }

  removeTail() {
    for (const node of this.tail) node.remove();
    this.tail = [];
  }

  show(token, links) {
    const nodes = renderToken(token, links).flatMap((node) => (node instanceof DocumentFragment ? [...node.childNodes] : [node]));
    this.root.append(...nodes);
    return nodes;
  }

  /** Render the text after the finished blocks; return whether there is more to render. */
  growTail(rest) {
    const cutAt = rest.length > MAX_TAIL ? rest.lastIndexOf("\n", MAX_TAIL) + 1 || MAX_LINE : unbrokenLength(rest);
    const isLong = cutAt > 0;
    const tokens = lex(isLong ? rest.slice(0, cutAt) : rest);
    const lastBlock = tokens.findLastIndex((token) => token.type !== "space");
    this.removeTail();
    let fenceComes = false;
    tokens.forEach((token, index) => {
      if (fenceComes) return;
      if (token.type === "code" && FENCE.test(token.raw)) {
        fenceComes = true;
      } else if (index < lastBlock || isLong) {
        this.show(token, tokens.links);
        this.done += token.raw.length;
      } else {
        this.tail.push(...this.show(token, tokens.links));
      }
    });
    this.wasCut ||= isLong;
    return fenceComes || isLong;
  }

  beginFence([opening, indent, marker, language]) {
    this.removeTail();
    this.done += opening.length;
    const closing = new RegExp(`^ {0,3}${marker[0]}{${marker.length},}[ \\t]*(?:\\n|$)`, "m");
    this.fence = { block: new CodeBlock(language), closing, indent };
    this.root.append(this.fence.block.node);
  }

  /** Append the new text to the code block; return whether the block has ended. */
  growFence() {
    const rest = this.text.slice(this.done);
    const closing = this.fence.closing.exec(rest);
    // A last line may still become the closing fence.
    const end = closing ? closing.index : Math.max(rest.lastIndexOf("\n") + 1, rest.length > MAX_LINE ? rest.length : 0);
    this.fence.block.append(rest.slice(0, end));
    this.done += end;
    if (!closing) return false;
    this.done += closing[0].length;
    this.fence.block.finish();
    this.fence = null;
    return true;
  }
}

/** Return the index to cut a text at if its last line is too long, else 0. */
function unbrokenLength(text) {
  const lineStart = text.lastIndexOf("\n") + 1;
  if (text.length - lineStart <= MAX_LINE) return 0;
  const space = text.lastIndexOf(" ", lineStart + MAX_LINE);
  if (space > lineStart) return space + 1;
  const end = lineStart + MAX_LINE;
  return /[\uD800-\uDBFF]/.test(text[end - 1]) ? end - 1 : end; // not inside a surrogate pair
}
