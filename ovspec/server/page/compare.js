// The same request with plain decoding and with speculation, side by side, timed.

import { streamEvents } from "./api.js";
import { byId, element } from "./dom.js";
import { addChoice, INSIDE_FIELDS, newPart } from "./generation.js";
import { makeLegend, TokenView } from "./tokens.js";

const NAMES = ["Plain", "Speculative"];
const MIN_TURNS = 4; // as in the server

class Column {
  constructor(name) {
    this.part = newPart();
    this.view = new TokenView(() => [this.part], { hasDetails: false });
    this.clock = element("span", { class: "clock", text: "waits" });
    this.start = 0;
    this.node = element("section", { class: "compared", "aria-label": name }, element("h3", {}, `${name} `, this.clock), this.view.node);
  }

  add(choice, timings) {
    this.start ||= performance.now();
    addChoice(this.part, choice, timings, performance.now() - this.start);
  }

  show() {
    this.view.update();
    if (!this.start) return;
    const { finish, timings, tokens } = this.part;
    const seconds = finish ? ((timings?.predicted_ms ?? 0) + (timings?.prompt_ms ?? 0)) / 1e3 : (performance.now() - this.start) / 1e3;
    this.clock.textContent = `${seconds.toFixed(2)} s, ${tokens.length} tokens`;
  }
}

/**
 * Compare in the dialog until it is closed.
 * @param {object} body the request's body
 * @returns {Promise<number | null>} the speed-up; null without a result
 */
export async function compare(body) {
  const dialog = byId("compare");
  const columns = NAMES.map((name) => new Column(name));
  const verdict = element("p", { class: "verdict", role: "status", text: "Generating the text without speculation (1 of 2) …" });
  const legend = element("div");
  byId("compare-content").replaceChildren(verdict, legend, element("div", { class: "columns" }, ...columns.map((column) => column.node)));
  const controller = new AbortController();
  dialog.addEventListener("close", () => controller.abort(), { once: true });
  dialog.showModal();
  let frame = 0;
  /** Name the phase and its progress. */
  const showPhase = (turns) => {
    if (!columns[0].part.finish) return;
    if (columns[1].part.finish) {
      const equal = columns[0].part.tokens.map(({ id }) => id).join() === columns[1].part.tokens.map(({ id }) => id).join();
      verdict.textContent = `The texts are ${equal ? "equal" : "different"}. Timing them: turn ${turns + 1}${turns < MIN_TURNS ? ` of at least ${MIN_TURNS}` : ""} …`;
    } else verdict.textContent = "Generating the text with speculation (2 of 2) …";
  };
  const draw = () => {
    frame = 0;
    for (const column of columns) column.show();
    legend.replaceChildren(makeLegend(columns[1].part.tokens));
    if (columns.some((column) => column.start && !column.part.finish)) schedule();
  };
  const schedule = () => (frame ||= requestAnimationFrame(draw));
  const showSpeeds = ({ turns, plain_per_second, speculative_per_second, speedup_sentence }) => {
    const when = speedup_sentence ? "median turn" : `turn ${turns}`;
    [plain_per_second, speculative_per_second].forEach((speed, index) => (columns[index].clock.textContent = `${speed.toFixed(1)} tokens/s, ${when}`));
  };
  let speedup = null;
  try {
    for await (const { choices, timings, comparison } of streamEvents("compare", { ...body, ...INSIDE_FIELDS }, controller.signal)) {
      for (const choice of choices) {
        // The first chunks have no token; the clock starts with the first token.
        if (choice.token_sources || choice.finish_reason) columns[choice.index].add(choice, timings);
        if (choice.finish_reason) showPhase(0);
      }
      if (comparison?.speedup_sentence) {
        speedup = comparison.speedup ?? null;
        verdict.classList.add(comparison.equal ? "good" : "bad");
        verdict.textContent = `${capitalised(comparison.speedup_sentence)}. ${capitalised(comparison.equality_sentence)}.`;
        showSpeeds(comparison);
        cancelAnimationFrame(frame);
        frame = 0;
      } else if (comparison) {
        showPhase(comparison.turns);
        showSpeeds(comparison);
      } else schedule();
    }
    for (const column of columns) column.view.update();
    legend.replaceChildren(makeLegend(columns[1].part.tokens));
  } catch (error) {
    if (error.name === "AbortError") return null;
    verdict.classList.add("bad");
    verdict.textContent = error.message;
  }
  return speedup;
}

const capitalised = (sentence) => sentence.charAt(0).toUpperCase() + sentence.slice(1);
