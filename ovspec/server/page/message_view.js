// A message: its text, thinking and calls, its tokens, and its buttons.

import { CodeBlock } from "./code_block.js";
import { button, copyText, element } from "./dom.js";
import { describeTimings, sumTimings } from "./generation.js";
import { GrowingMarkdown, showMarkdown } from "./markdown.js";
import { plot, speedPoints } from "./plot.js";
import { makeLegend, TokenView } from "./tokens.js";

const WHO = { user: "You", assistant: "Answer", tool: "Result of a tool" };
const FINISHES = {
  length: "Cut off at the maximum number of tokens; it can be continued.",
  stopped: "Stopped; it can be continued.",
};
const FULL = "Cut off at the end of the model's context.";
const MAX_JSON = 100_000; // maximum characters of JSON shown with line breaks

/** Return JSON with line breaks, or a text that isn't JSON unchanged. */
function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const looksLikeJson = (text) => text.length < MAX_JSON && /^\s*[[{]/.test(text) && prettyJson(text) !== text.trimEnd();

/** The element of a message. `actions`: see app.js. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.parts = []; // the parts of a growing answer, or loaded on demand
    this.isRich = false;
    this.growing = null;
    this.inside = null;
    this.facts = element("p", { class: "facts" });
    this.body = element("div", { class: "body" });
    this.ending = element("div", { class: "ending" });
    this.toolbar = element("div", { class: "actions" });
    this.branches = element("div", { class: "branches" });
    const head = element("div", { class: "head" }, element("h2", { text: WHO[message.role] }), this.branches);
    this.node = element("article", { class: `message ${message.role}`, "aria-label": WHO[message.role], "data-id": message.id, tabindex: "-1" }, head, this.body, this.ending, this.facts, this.toolbar);
    this.showPlain();
  }

  /** Show the text without formatting: fast, and the browser can search it. */
  showPlain() {
    const { message } = this;
    this.body.replaceChildren(element("div", { class: "plain", dir: "auto", text: message.content || message.thinking || "" }));
  }

  /** Show the message with formatting and buttons, once it comes into view. */
  enrich() {
    if (this.isRich) return;
    this.isRich = true;
    this.showWhole();
    this.showActions();
  }

  showWhole() {
    const { message } = this;
    this.showFacts(message.stats);
    this.showBranches();
    if (message.role === "user") return;
    if (message.role === "tool") {
      this.body.replaceChildren(new CodeBlock("json").append(prettyJson(message.content)).finish().node);
      return;
    }
    const content = element("div", { class: "markdown" });
    const isJson = message.isJson || looksLikeJson(message.content);
    if (isJson && message.content) content.append(new CodeBlock("json").append(prettyJson(message.content)).finish().node);
    else showMarkdown(content, message.content);
    this.body.replaceChildren(...this.makeThinking(), content, ...this.makeCalls());
    this.showEnding();
  }

  makeThinking() {
    if (!this.message.thinking) return [];
    const text = element("div", { class: "markdown" });
    showMarkdown(text, this.message.thinking);
    return [element("details", { class: "thinking" }, element("summary", { text: "Thinking" }), text)];
  }

  /** Show the reason for the answer's end, below its text or tokens. */
  showEnding() {
    const { finish, error, schemaErrors } = this.message;
    const sentences = [];
    const ending = this.actions.fillsContext(this.message) ? FULL : FINISHES[finish];
    if (ending) sentences.push(element("p", { class: "note", text: ending }));
    if (error) sentences.push(element("p", { class: "error", role: "alert", text: error }));
    for (const sentence of schemaErrors ?? []) sentences.push(element("p", { class: "error", text: `Schema: ${sentence}` }));
    this.ending.replaceChildren(...sentences);
  }

  makeCalls() {
    return (this.message.calls ?? []).map((call) => {
      const result = element("textarea", { rows: "2", "aria-label": `Result of ${call.function.name}`, placeholder: "Result of the call" });
      const send = button("Send result", () => result.value.trim() && this.actions.answerCall(this.message, call, result.value));
      return element(
        "section",
        { class: "call", "aria-label": `Call of ${call.function.name}` },
        element("h3", {}, "Call of ", element("code", { text: call.function.name })),
        new CodeBlock("json").append(prettyJson(call.function.arguments)).finish().node,
        this.actions.isAnswered(call) ? null : element("div", { class: "call-result" }, result, send),
      );
    });
  }

  // ------------------------------------------------------------ growing

  /** Begin to show a growing text; `isJson`: whether it is JSON. */
  beginGrowth(parts, isJson) {
    this.isRich = true;
    this.parts = parts;
    const thinking = element("div", { class: "markdown" });
    const content = element("div", { class: "markdown" });
    const thinkingBox = element("details", { class: "thinking", hidden: true }, element("summary", { text: "Thinking …" }), thinking);
    this.growing = { thinking: new GrowingMarkdown(thinking), thinkingBox, content: new GrowingMarkdown(content), isJson, before: isJson ? "```json\n" : "" };
    this.body.replaceChildren(thinkingBox, content, element("span", { class: "cursor", "aria-hidden": "true" }));
    this.node.setAttribute("aria-busy", "true");
    this.node.querySelector(".verdict")?.remove();
    this.ending.replaceChildren();
    this.toolbar.replaceChildren(button("Stop", () => this.actions.stop(), { "aria-keyshortcuts": "Escape" }));
    this.showBranches();
    this.facts.textContent = "waiting for the first token …";
    if (this.actions.showsInside()) this.openInside();
  }

  /** Show the new text, as far as a frame's time allows; return whether all of it is shown. */
  grow() {
    const { thinking, thinkingBox, content, before } = this.growing;
    const { message } = this;
    let isAll = true;
    if (message.thinking && !message.content) {
      thinkingBox.hidden = false;
      isAll = thinking.update(message.thinking);
    }
    if (message.content) isAll = content.update(before + message.content);
    this.showFacts(sumTimings(this.parts));
    this.inside?.view.update();
    this.inside?.showNumbers();
    return isAll;
  }

  endGrowth() {
    const { content, isJson } = this.growing;
    const thinkingWasOpen = this.growing.thinkingBox.open;
    this.growing = null;
    this.node.removeAttribute("aria-busy");
    const mustRender = isJson || looksLikeJson(this.message.content) || !this.message.content;
    if (mustRender) {
      this.showWhole();
    } else {
      content.finish();
      this.showFacts(this.message.stats);
      this.body.replaceChildren(...this.makeThinking(), content.root, ...this.makeCalls());
      this.showEnding();
    }
    const thinking = this.body.querySelector(".thinking");
    if (thinking) thinking.open = thinkingWasOpen;
    this.inside?.showNumbers();
    this.showActions();
  }

  // ------------------------------------------------------------ around the text

  showFacts(stats) {
    const facts = describeTimings(stats).map(([name, text]) => element("span", { class: `fact fact-${name}`, text }));
    if (this.message.speedup) facts.unshift(element("span", { class: "fact fact-speedup", text: `speed-up ${this.message.speedup.toFixed(2)}` }));
    this.facts.replaceChildren(...facts);
  }

  /** Show the branches and buttons again: they depend on other messages. */
  showSurroundings() {
    this.showBranches();
    this.showActions();
  }

  showBranches() {
    const { index, count } = this.actions.placeAmongBranches(this.message);
    if (count < 2) {
      this.branches.replaceChildren();
      return;
    }
    const step = (by, label, sign) => button(label, () => this.actions.showBranch(this.message, by), { sign, disabled: index + by < 0 || index + by >= count });
    this.branches.replaceChildren(step(-1, "Earlier branch", "‹"), element("span", { text: `${index + 1} / ${count}` }), step(1, "Later branch", "›"));
  }

  showActions() {
    const { message, actions } = this;
    const buttons = [button("Copy", () => copyText(message.content, "Message copied."))];
    if (message.role === "assistant") {
      this.insideButton = button("Inside", () => this.toggleInside(), { "aria-pressed": String(Boolean(this.inside)), title: "Who proposed each token" });
      buttons.push(this.insideButton, button("Compare", () => actions.compare(message), { title: "Plain and speculative, side by side" }));
      buttons.push(button("Verify", () => this.verify(), { title: "Check each token by one pass of the model" }));
      if (actions.canContinue(message)) buttons.push(button("Continue", () => actions.continueAnswer(message)));
      buttons.push(button("Regenerate", () => actions.regenerate(message)));
    }
    if (actions.canTryAgain(message)) buttons.push(button("Try again", () => actions.tryAgain(message)));
    if (message.role !== "tool") buttons.push(button("Edit", () => this.edit(), { class: "edit" }));
    buttons.push(button("Delete", () => actions.remove(message)));
    this.toolbar.replaceChildren(...buttons);
  }

  /** Let the user change the text, as a branch of the chat. */
  edit() {
    const { message, actions } = this;
    const text = element("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), value: message.content, "aria-label": "Text of the message" });
    const isUser = message.role === "user";
    const close = () => {
      this.isRich = false;
      this.showPlain();
      this.enrich();
      this.body.hidden = this.inside !== null;
    };
    const cancel = () => {
      close();
      this.node.focus();
    };
    const save = () => {
      if (!text.value.trim()) text.focus();
      else if (actions.edit(message, text.value)) close();
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") (event.stopPropagation(), cancel());
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    });
    this.body.hidden = false;
    this.body.replaceChildren(element("div", { class: "editor" }, text, element("div", { class: "actions" }, button(isUser ? "Send as a branch" : "Save as a branch", save, { class: "primary" }), button("Cancel", cancel))));
    text.focus();
  }

  // ------------------------------------------------------------ inside

  async toggleInside() {
    const opens = !this.inside;
    this.actions.rememberInside(opens);
    if (opens) {
      if (!this.parts.length) this.parts = await this.actions.loadParts(this.message);
      if (!this.inside) this.openInside();
    } else {
      this.inside.node.remove();
      this.inside = null;
      this.body.hidden = false;
    }
    this.insideButton?.setAttribute("aria-pressed", String(opens));
  }

  openInside() {
    const view = new TokenView(() => this.parts);
    const numbers = element("div", { class: "numbers" });
    const node = element("section", { class: "inside", "aria-label": "Inside the answer" }, numbers, view.node);
    const showNumbers = () => {
      const tokens = this.parts.flatMap((part) => part.tokens);
      const stats = sumTimings(this.parts);
      const saved = stats ? stats.tokens - stats.rounds : 0;
      const sentence = element("p", { class: "saved", text: `${saved} of ${stats?.tokens ?? 0} tokens cost no inference of their own; ${stats?.rounds ? (stats.tokens / stats.rounds).toFixed(2) : "0"} tokens a round.` });
      const drafters = Object.entries(stats?.drafters ?? {}).map(([name, { proposed, accepted }]) => `${name}: ${accepted} of ${proposed} accepted`);
      const lastTimes = this.parts.at(-1)?.times ?? [];
      numbers.replaceChildren(
        makeLegend(tokens),
        stats?.tokens ? sentence : element("p", { text: "No tokens are known of this answer." }),
        drafters.length ? element("p", { text: drafters.join("; ") }) : "",
        plot(speedPoints(lastTimes), "Tokens a second along the answer", { note: " at its end" }),
      );
    };
    let shownAt = 0;
    const showNumbersSometimes = () => {
      if (this.growing && performance.now() - shownAt < 250) return;
      shownAt = performance.now();
      showNumbers();
    };
    view.update();
    this.inside?.node.remove(); // from before the continuation
    this.inside = { node, view, showNumbers: showNumbersSometimes };
    showNumbersSometimes();
    this.body.after(node);
    this.body.hidden = true;
  }

  async verify() {
    let verdict = this.node.querySelector(".verdict");
    if (!verdict) this.toolbar.after((verdict = element("p", { class: "verdict", role: "status" })));
    verdict.className = "verdict";
    verdict.textContent = "Verifying: one pass of the model over the answer …";
    const { ok, sentence } = await this.actions.verify(this.message);
    verdict.classList.add(ok ? "good" : "bad");
    verdict.textContent = sentence;
    verdict.scrollIntoView({ block: "nearest" });
  }
}
