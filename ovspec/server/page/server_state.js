// The server's state: model, requests, cache, and speeds since the panel was opened.

import { getJson, send } from "./api.js";
import { element } from "./dom.js";
import { plot, thin } from "./plot.js";

const INTERVAL_MS = 2_000;
const MAX_SAMPLES = 900; // half an hour

/** Return the sum of each metric over its labels; metrics with a drafter also by drafter. */
export function parseMetrics(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const match = /^(\w+)(?:\{([^}]*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    values[name] = (values[name] ?? 0) + Number(value);
    const drafter = /drafter="([^"]*)"/.exec(labels)?.[1];
    if (drafter) values[`${name} ${drafter}`] = Number(value);
  }
  return values;
}

const gigabytes = (bytes) => (bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : `${(bytes / 1e6).toFixed(0)} MB`);
const count = (value) => (value ?? 0).toLocaleString("en");

/** Return the points of a rate between neighbouring samples: per second, or per another count, with gaps while idle. */
function rates(samples, tokens, per) {
  const points = [];
  for (let index = 1; index < samples.length; index += 1) {
    const [before, after] = [samples[index - 1], samples[index]];
    const amount = (after.values[tokens] ?? 0) - (before.values[tokens] ?? 0);
    const base = per ? (after.values[per] ?? 0) - (before.values[per] ?? 0) : (after.time - before.time) / 1e3;
    points.push([after.time, base > 0 ? amount / base : per ? null : 0]);
  }
  return thin(points, 150);
}

/** The panel. It asks the server only while it is open. */
export class ServerState {
  constructor(root) {
    this.root = root;
    this.samples = [];
    this.timer = 0;
    this.model = null;
  }

  open() {
    if (this.timer) return;
    this.root.replaceChildren(element("p", { text: "Asking the server …" }));
    this.timer = setInterval(() => document.visibilityState === "visible" && this.sample(), INTERVAL_MS);
    this.sample();
  }

  close() {
    clearInterval(this.timer);
    this.timer = 0;
  }

  async sample() {
    try {
      const [models, ready, metrics] = await Promise.all([this.model ?? getJson("v1/models"), getJson("ready"), send("metrics")]);
      this.model = models;
      this.samples.push({ time: Date.now(), values: parseMetrics(await metrics.text()) });
      this.samples = this.samples.slice(-MAX_SAMPLES);
      this.show(ready);
    } catch (error) {
      this.root.replaceChildren(element("p", { class: "error", role: "alert", text: error.message }));
    }
  }

  show(ready) {
    const { values } = this.samples.at(-1);
    const facts = [
      ["Running texts", count(values.ovspec_texts_running)],
      ["Waiting texts", count(values.ovspec_texts_waiting)],
      ["Tokens generated", count(values.ovspec_generated_tokens_total)],
      ["Rounds", count(values.ovspec_rounds_total)],
      ["Prompt tokens", count(values.ovspec_prompt_tokens_total)],
      ["of them cached", count(values.ovspec_cached_tokens_total)],
    ];
    for (const drafter of ready.drafters) {
      const proposed = values[`ovspec_proposed_tokens_total ${drafter}`] ?? 0;
      const accepted = values[`ovspec_accepted_tokens_total ${drafter}`] ?? 0;
      facts.push([`Accepted of ${drafter}`, `${count(accepted)} of ${count(proposed)}`]);
    }
    this.root.replaceChildren(
      element("h3", { text: "Models" }),
      ...this.model.data.map((model) => describeModel(model, ready)),
      element("h3", { text: "Requests" }),
      makeFacts(facts),
      element("h3", { text: "KV cache" }),
      ...this.describeCache(ready.cache),
      element("h3", { text: "Since this panel was opened" }),
      plot(rates(this.samples, "ovspec_generated_tokens_total"), "Tokens generated a second", { note: ` in the last ${INTERVAL_MS / 1e3} s` }),
      plot(rates(this.samples, "ovspec_generated_tokens_total", "ovspec_rounds_total"), "Tokens a round", { format: (value) => value.toFixed(2) }),
      plot(rates(this.samples, "ovspec_accepted_tokens_total", "ovspec_proposed_tokens_total").map(([x, y]) => [x, y === null ? null : 100 * y]), "Accepted of proposed tokens", { unit: " %" }),
      plot(this.samples.map(({ time, values: sample }) => [time, sample.ovspec_texts_running ?? 0]), "Running texts"),
    );
  }

  describeCache(cache) {
    const share = (bytes) => `${Math.min(100, (100 * bytes) / Math.max(cache.limit_bytes, 1))}%`;
    const used = element("span", { class: "bar-used" });
    const kept = element("span", { class: "bar-kept" });
    used.style.width = share(cache.used_bytes);
    kept.style.width = share(cache.kept_bytes);
    const filled = Math.round((100 * (cache.used_bytes + cache.kept_bytes)) / Math.max(cache.limit_bytes, 1));
    return [
      element("div", { class: "bar", role: "img", "aria-label": `${filled} % of the memory for KV caches is in use` }, used, kept),
      makeFacts([
        ["Running texts hold", gigabytes(cache.used_bytes)],
        ["Running texts reserve", gigabytes(cache.reserved_bytes)],
        ["Kept of ended texts", gigabytes(cache.kept_bytes)],
        ["Limit", gigabytes(cache.limit_bytes)],
        ["Texts set back", count(cache.set_back_count)],
      ]),
    ];
  }
}

const makeFacts = (facts) => element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", { text: name }), element("dd", { text: value })]));

function describeModel(model, ready) {
  return makeFacts([
    ["Model", model.id],
    ["Weights", gigabytes(model.meta.size)],
    ["Context", model.max_model_len ? `${count(model.max_model_len)} tokens` : "unknown"],
    ["Device", `${ready.device}, ${ready.engine} engine`],
    ["Arithmetic", ready.arithmetic],
    ["Drafters", ready.drafters.join(", ") || "none"],
    ["Sampling", Object.entries(model.sampling).map(([name, value]) => `${name} ${value}`).join(", ") || "greedy"],
  ]);
}
