// The tokens of an answer, coloured by origin, with details of each token.

import { getJson } from "./api.js";
import { byId, element, setAttributes } from "./dom.js";

const SOURCE_NAMES = { target: "the model itself", lookup: "lookup", draft: "draft model", head: "head", mtp: "MTP head", forced: "forced by the grammar" };
const CHUNK_TOKENS = 150;
const ALTERNATIVES = 5;

export const nameOfSource = (source) => SOURCE_NAMES[source] ?? source;
const classOfSource = (source) => `from-${SOURCE_NAMES[source] ? source : "other"}`;

/** Return a list of the tokens' origins, with the number of tokens of each. */
export function makeLegend(tokens) {
  const counts = { target: 0 };
  for (const { source } of tokens) counts[source] = (counts[source] ?? 0) + 1;
  const entries = Object.entries(counts).map(([source, count]) =>
    element("li", {}, element("span", { class: `token ${classOfSource(source)}`, text: nameOfSource(source) }), ` ${count}`),
  );
  return element("ul", { class: "legend", "aria-label": "Tokens proposed by" }, ...entries);
}

/** Return a token's text with visible spaces and line breaks. */
const quote = (text) => JSON.stringify(text).slice(0, 80);

/** The tokens of an answer's parts. They only grow. */
export class TokenView {
  /** @param {() => import("./generation.js").Part[]} getParts */
  constructor(getParts, { hasDetails = true } = {}) {
    this.getParts = getParts;
    this.shown = []; // number of shown tokens, by part
    this.probabilities = []; // promises, by part
    this.current = null;
    this.node = element("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
    if (hasDetails) this.bindDetails();
  }

  /** Show a token's details when the user points at it or reaches it by keys. */
  bindDetails() {
    setAttributes(this.node, {
      class: "tokens detailed",
      tabindex: "0",
      "aria-label": "Tokens; arrow keys go from one to the next",
      onkeydown: (event) => this.pressKey(event),
      onpointerover: (event) => event.target.matches?.(".token") && this.describe(event.target),
      onpointerleave: () => this.hide(),
      onclick: (event) => event.target.matches?.(".token") && this.describe(event.target),
      onblur: () => this.hide(),
    });
  }

  update() {
    this.getParts().forEach((part, partIndex) => {
      this.shown[partIndex] ??= 0;
      for (; this.shown[partIndex] < part.tokens.length; this.shown[partIndex] += 1) this.add(part.tokens[this.shown[partIndex]], partIndex, this.shown[partIndex]);
    });
  }

  add({ text, source }, partIndex, index) {
    const chunk = this.node.lastElementChild;
    const isFull = !chunk || (chunk.childElementCount >= CHUNK_TOKENS && (/\n$/.test(chunk.textContent) || chunk.childElementCount >= 2 * CHUNK_TOKENS));
    const place = isFull ? this.node.appendChild(element("div", { class: "token-chunk", dir: "auto" })) : chunk;
    const lineBreak = text.includes("\n") ? " line-break" : ""; // makes a line break visible, to point at
    place.append(element("span", { class: `token ${classOfSource(source)}${lineBreak}`, "data-part": partIndex, "data-index": index }, text || "·"));
  }

  pressKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape" && this.current) {
      event.stopPropagation();
      this.hide();
    }
    if (!(event.key in steps)) return;
    event.preventDefault();
    const tokens = [...this.node.querySelectorAll(".token")];
    const index = tokens.indexOf(this.current) + steps[event.key];
    const token = tokens[Math.max(0, Math.min(tokens.length - 1, index))];
    token?.scrollIntoView({ block: "nearest" });
    if (token) this.describe(token);
  }

  hide() {
    this.current?.classList.remove("current");
    this.current = null;
    byId("token-details").hidden = true;
  }

  /** Show a token's details beside it; its probability is requested from the model on first use. */
  async describe(span) {
    this.current?.classList.remove("current");
    this.current = span;
    span.classList.add("current");
    const partIndex = Number(span.dataset.part);
    const index = Number(span.dataset.index);
    const token = this.getParts()[partIndex].tokens[index];
    showDetails(span, token, element("p", { text: "Probability: computing …" }));
    this.probabilities[partIndex] ??= computeProbabilities(this.getParts()[partIndex]);
    let more;
    try {
      more = listAlternatives((await this.probabilities[partIndex])[index]);
    } catch (error) {
      this.probabilities[partIndex] = undefined;
      more = element("p", { text: error.message });
    }
    if (this.current === span) showDetails(span, token, more);
  }
}

function showDetails(span, token, more) {
  const details = byId("token-details");
  details.replaceChildren(
    element("p", {}, element("code", { text: quote(token.text) }), ` id ${token.id}, `, element("strong", { text: token.source === "target" ? "chosen by the model itself" : `proposed by ${nameOfSource(token.source)}`.replace("proposed by forced", "forced") })),
    more,
  );
  details.hidden = false;
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const { offsetWidth, offsetHeight } = details;
  const below = place.bottom + 6 + offsetHeight < innerHeight;
  details.style.left = `${Math.max(8, Math.min(place.left, innerWidth - offsetWidth - 8))}px`;
  details.style.top = `${Math.max(8, below ? place.bottom + 6 : place.top - offsetHeight - 6)}px`;
}

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return `${share >= 10 ? share.toFixed(0) : share.toPrecision(2)} %`;
};

function listAlternatives(place) {
  if (!place) return element("p", { text: "Its probability isn't known." });
  const rows = Object.entries(place.top)
    .sort(([, a], [, b]) => b - a)
    .map(([text, logprob]) => element("li", {}, element("code", { text: quote(text) }), ` ${percent(logprob)}`));
  return element("div", {}, element("p", { text: `Probability ${percent(place.logprob)}; the most likely here:` }), element("ol", {}, ...rows));
}

/** Return the probability of each token of a part and of its alternatives, by a single forward pass over the text. */
async function computeProbabilities(part) {
  if (!part.finish) throw new Error("Its probability can be computed once the answer is whole.");
  if (!part.record) throw new Error("This part of the answer was interrupted, so its probabilities aren't known; regenerate the answer.");
  const promptIds = part.record.prompt_token_ids;
  const ids = [...promptIds, ...part.record.healed_token_ids, ...part.tokens.map((token) => token.id)];
  const reply = await getJson("v1/completions", { body: { prompt: ids, echo: true, logprobs: ALTERNATIVES, max_tokens: 0 } });
  const { token_logprobs: logprobs, top_logprobs: tops } = reply.choices[0].logprobs;
  const first = ids.length - part.tokens.length;
  return part.tokens.map((_, index) => ({ logprob: logprobs[first + index], top: tops[first + index] }));
}
