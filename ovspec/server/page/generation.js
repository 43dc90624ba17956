// An answer during its generation: its text, tokens, counts and times.

import { streamEvents } from "./api.js";

/**
 * A part of an answer: the output of a single request.
 * @typedef {object} Part
 * @property {string} content
 * @property {string} thinking
 * @property {object[]} calls
 * @property {{id: number, text: string, source: string}[]} tokens
 * @property {[number, number][]} times (milliseconds since the request, number of tokens received then)
 * @property {object | null} timings
 * @property {object | null} record the server's record, to verify the text
 * @property {string | null} finish
 * @property {string[]} schemaErrors
 */

/** @returns {Part} */
export function newPart() {
  return { content: "", thinking: "", calls: [], tokens: [], times: [], timings: null, record: null, finish: null, schemaErrors: [] };
}

/** Request fields for the origin of tokens, timings and the record. */
export const INSIDE_FIELDS = { return_token_sources: true, timings_per_token: true, return_record: true };

/** Add a choice of a chunk to a part. */
export function addChoice(part, choice, timings, milliseconds) {
  const { delta } = choice;
  if (delta?.content) part.content += delta.content;
  if (delta?.reasoning_content) part.thinking += delta.reasoning_content;
  for (const call of delta?.tool_calls ?? []) {
    if (call.id) part.calls[call.index] = { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
    part.calls[call.index].function.arguments += call.function.arguments ?? "";
  }
  if (choice.token_sources?.length) {
    part.tokens.push(...choice.token_sources);
    part.times.push([milliseconds, choice.token_sources.length]);
  }
  if (timings) part.timings = timings;
  if (choice.record) part.record = choice.record;
  if (choice.schema_errors) part.schemaErrors = choice.schema_errors;
  if (choice.finish_reason) part.finish = choice.finish_reason;
}

/**
 * Generate an answer into `part`, and call `onGrowth` after each chunk. Ends with the text, or by `signal`.
 * @param {object} body
 * @param {Part} part
 */
export async function generate(body, part, signal, onGrowth) {
  const start = performance.now();
  try {
    for await (const chunk of streamEvents("v1/chat/completions", { ...body, ...INSIDE_FIELDS }, signal)) {
      for (const choice of chunk.choices) addChoice(part, choice, chunk.timings, performance.now() - start);
      onGrowth();
    }
  } catch (error) {
    part.finish = error.name === "AbortError" ? "stopped" : "failed";
    if (part.finish === "failed") throw error;
  }
}

/** Return an answer's counts and times over all its parts, or null. */
export function sumTimings(parts) {
  const all = parts.map((part) => part.timings).filter(Boolean);
  if (!all.length) return null;
  const sum = (name) => all.reduce((total, timings) => total + (timings[name] ?? 0), 0);
  const drafters = {};
  for (const timings of all) {
    for (const [name, { proposed, accepted }] of Object.entries(timings.drafters)) {
      drafters[name] ??= { proposed: 0, accepted: 0 };
      drafters[name].proposed += proposed;
      drafters[name].accepted += accepted;
    }
  }
  const later = sum("predicted_n") - all.length; // the times exclude each part's first token
  return {
    tokens: sum("predicted_n"),
    rounds: sum("rounds"),
    forced: sum("forced_n"),
    proposed: sum("draft_n"),
    accepted: sum("draft_n_accepted"),
    perSecond: later > 0 && sum("predicted_ms") ? (1e3 * later) / sum("predicted_ms") : null,
    firstTokenMs: all[0].prompt_ms,
    promptTokens: all[0].prompt_n + all[0].cache_n,
    cachedTokens: all[0].cache_n,
    drafters,
  };
}

export function describeTimings(timings) {
  if (!timings?.tokens) return [];
  const { perSecond, tokens, rounds, accepted, proposed, cachedTokens, promptTokens, firstTokenMs } = timings;
  const facts = [];
  if (perSecond) facts.push(["speed", `${perSecond.toFixed(perSecond < 10 ? 1 : 0)} tokens/s`]);
  facts.push(["tokens", `${tokens} token${tokens === 1 ? "" : "s"} in ${rounds} round${rounds === 1 ? "" : "s"}`]);
  if (proposed) facts.push(["accepted", `${accepted} of ${proposed} proposed accepted (${Math.round((100 * accepted) / proposed)} %)`]);
  facts.push(["cached", `${cachedTokens} of ${promptTokens} prompt tokens cached`]);
  facts.push(["first", `first token after ${firstTokenMs < 1000 ? `${firstTokenMs.toFixed(0)} ms` : `${(firstTokenMs / 1e3).toFixed(1)} s`}`]);
  return facts;
}
