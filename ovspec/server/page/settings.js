// The settings of a chat: their form, and the request fields made of them.

import { ApiError, getJson } from "./api.js";
import { button, byId, element, setAttributes } from "./dom.js";

/**
 * @typedef {object} Field
 * @property {string} name the name of the request's field, and of the setting
 * @property {string} label
 * @property {"text" | "number" | "lines" | "json" | "check" | "choice" | "word"} kind
 * @property {string[]} [choices]
 * @property {number} [step]
 * @property {string} [hint] if the server has no description
 */

/** @type {{title: string, fields: Field[]}[]} */
const GROUPS = [
  { title: "Prompt", fields: [{ name: "system", label: "System prompt", kind: "text", hint: "Comes before the chat." }] },
  {
    title: "Sampling",
    fields: [
      { name: "temperature", label: "Temperature", kind: "number", step: 0.1 },
      { name: "top_p", label: "Top-p", kind: "number", step: 0.05 },
      { name: "top_k", label: "Top-k", kind: "number", step: 1 },
      { name: "min_p", label: "Min-p", kind: "number", step: 0.01 },
      { name: "typical_p", label: "Typical-p", kind: "number", step: 0.05 },
      { name: "repetition_penalty", label: "Repetition penalty", kind: "number", step: 0.05 },
      { name: "presence_penalty", label: "Presence penalty", kind: "number", step: 0.1 },
      { name: "frequency_penalty", label: "Frequency penalty", kind: "number", step: 0.1 },
      { name: "seed", label: "Seed", kind: "number", step: 1 },
      { name: "max_tokens", label: "Max tokens", kind: "number", step: 1 },
      { name: "min_tokens", label: "Min tokens", kind: "number", step: 1 },
      { name: "stop", label: "Stop strings, one a line", kind: "lines", hint: "The answer ends before any of these. \\n is a line break." },
      { name: "logit_bias", label: "Logit bias (JSON)", kind: "json" },
      { name: "ignore_eos", label: "Ignore the end token", kind: "check" },
    ],
  },
  {
    title: "Answer format",
    fields: [
      {
        name: "format",
        label: "Format",
        kind: "choice",
        choices: ["", "json_object", "json_schema", "regex", "choice", "gbnf", "grammar"],
        hint: "What the whole answer must be.",
      },
      { name: "format_text", label: "Schema or grammar", kind: "text", hint: "A JSON schema, a regular expression, texts to choose from (one a line), or a grammar." },
      { name: "json_schema_mode", label: "Schema mode", kind: "choice", choices: ["", "strict", "checked"] },
      { name: "compact_json", label: "Compact JSON", kind: "check" },
    ],
  },
  {
    title: "Tools and thinking",
    fields: [
      { name: "tools", label: "Tools (JSON)", kind: "json" },
      { name: "tool_choice", label: "Tool choice", kind: "choice", choices: ["", "auto", "none", "required"] },
      { name: "reasoning_effort", label: "Reasoning effort", kind: "choice", choices: ["", "none", "minimal", "low", "medium", "high", "xhigh"] },
      { name: "max_thinking_tokens", label: "Max thinking tokens", kind: "number", step: 1 },
      { name: "chat_template_kwargs", label: "Template variables (JSON)", kind: "json" },
    ],
  },
  {
    title: "Speculation",
    fields: [
      { name: "draft", label: "Draft", kind: "choice", choices: ["", "none"] },
      { name: "lookahead", label: "Lookahead", kind: "word" },
      { name: "accept", label: "Accept rule", kind: "choice", choices: ["", "compare", "rejection"] },
    ],
  },
];
const FIELDS = GROUPS.flatMap((group) => group.fields);
const CHOICE_NAMES = {
  format: { "": "Any text", json_object: "JSON", json_schema: "JSON schema", regex: "Regular expression", choice: "One of several texts", gbnf: "GBNF grammar", grammar: "Lark grammar" },
  draft: { "": "Server's choice", none: "None: plain decoding" },
};
const FORMATS_WITH_TEXT = ["json_schema", "regex", "choice", "gbnf", "grammar"];

/** An invalid setting, found before sending it. */
export class SettingError extends ApiError {
  constructor(message, field) {
    super(message, 0, field);
  }
}

function parseJson(text, field) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`This isn't JSON: ${error.message}.`, field);
  }
}

/** Return the request fields for the settings; throws SettingError. */
export function toRequestFields(settings) {
  const fields = {};
  for (const { name, kind } of FIELDS) {
    const value = settings[name];
    if (["system", "format", "format_text"].includes(name) || value === undefined || value === "" || value === false) continue;
    if (kind === "number") {
      if (!Number.isFinite(Number(value))) throw new SettingError("This must be a number.", name);
      fields[name] = Number(value);
    } else if (kind === "lines") fields[name] = value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    else if (kind === "json") fields[name] = parseJson(value, name);
    else if (kind === "word") fields[name] = /^\d+$/.test(value.trim()) ? Number(value) : value.trim();
    else fields[name] = value;
  }
  return { ...fields, ...toFormatFields(settings) };
}

function toFormatFields({ format, format_text: text = "" }) {
  if (format === "json_object") return { response_format: { type: "json_object" } };
  if (!FORMATS_WITH_TEXT.includes(format)) return {};
  if (!text.trim()) throw new SettingError("This is empty; write what the answer must match, or choose another format.", "format_text");
  if (format === "json_schema") return { json_schema: parseJson(text, "format_text") };
  if (format === "choice") return { choice: text.split("\n").filter(Boolean) };
  return { [format]: text };
}

export const asksForJson = (settings) => ["json_object", "json_schema"].includes(settings.format);

/** Return the setting for a field named in a server error, or null. */
function settingOf(field) {
  const name = field?.split(".")[0];
  if (["json_schema", "response_format", "regex", "choice", "gbnf", "grammar"].includes(name)) return "format_text";
  if (name === "stop_ids" || name === "max_completion_tokens") return name === "stop_ids" ? "stop" : "max_tokens";
  return FIELDS.some((known) => known.name === name) ? name : null;
}

/** Return how many settings differ from the server's defaults. */
function countChanges(settings) {
  const isUsed = (name) => name !== "format_text" && settings[name] !== undefined && settings[name] !== "" && settings[name] !== false;
  return FIELDS.filter(({ name }) => isUsed(name)).length;
}

/** The form. `onChange` is called whenever a setting has changed. */
export class SettingsForm {
  constructor(root, onChange) {
    this.root = root;
    this.onChange = onChange;
    this.inputs = {};
    this.settings = {};
    this.count = element("span", { class: "note" });
    this.reset = button("Reset", () => this.resetAll(), { title: "Use the server's defaults" });
    root.append(element("div", { class: "bar-row changes" }, this.count, this.reset));
    root.append(...GROUPS.map((group) => this.makeGroup(group)));
    // Hints have a fixed place: if they moved a field during a click, the click would miss it.
    const hint = element("p", { class: "hint-box", "aria-hidden": "true" });
    root.append(hint);
    for (const event of ["focusin", "pointerover"]) {
      root.addEventListener(event, ({ target }) => (hint.textContent = target.closest(".field")?.querySelector(".hint").textContent ?? ""));
    }
    root.addEventListener("input", () => this.read());
    root.addEventListener("change", (event) => event.target.name?.startsWith("format") && this.checkFormat());
  }

  makeGroup({ title, fields }) {
    return element("fieldset", {}, element("legend", { text: title }), ...fields.map((field) => this.makeField(field)));
  }

  makeField({ name, label, kind, choices, step, hint }) {
    const id = `setting-${name}`;
    const attributes = { id, name, "aria-describedby": `${id}-hint ${id}-error`, autocomplete: "off" };
    let input;
    if (kind === "choice") {
      input = element("select", attributes, ...choices.map((choice) => element("option", { value: choice, text: CHOICE_NAMES[name]?.[choice] ?? (choice || "Default") })));
    } else if (["text", "lines", "json"].includes(kind)) {
      input = element("textarea", { ...attributes, rows: kind === "lines" ? 2 : 3, spellcheck: name === "system" ? "true" : "false" });
    } else if (kind === "check") {
      input = element("input", { ...attributes, type: "checkbox" });
    } else {
      input = element("input", { ...attributes, type: kind === "number" ? "number" : "text", step: step === 1 ? 1 : "any", placeholder: "default" });
    }
    this.inputs[name] = input;
    return element(
      "div",
      { class: `field ${kind}` },
      element("label", { for: id, text: label }),
      input,
      element("p", { class: "error", id: `${id}-error` }),
      element("p", { class: "hint hidden", id: `${id}-hint`, text: hint ?? "" }),
    );
  }

  /** Show settings. */
  show(settings) {
    this.settings = settings;
    for (const { name, kind } of FIELDS) {
      if (kind === "check") this.inputs[name].checked = settings[name] === true;
      else this.inputs[name].value = settings[name] ?? "";
    }
    this.clearErrors();
    this.showFormat();
    this.showCount();
  }

  /** Show how many settings differ from the defaults, here and on the button that opens the panel. */
  showCount() {
    const count = countChanges(this.settings);
    const sentence = `${count || "No"} setting${count === 1 ? " differs" : "s differ"} from the server's defaults`;
    this.count.textContent = `${sentence}.`;
    this.reset.disabled = !count;
    byId("show-settings").textContent = count ? `Settings (${count})` : "Settings";
    setAttributes(byId("show-settings"), { title: sentence, "aria-label": count ? `Settings (${count}): ${sentence}` : "Settings" });
  }

  resetAll() {
    for (const { name } of FIELDS) delete this.settings[name];
    this.show(this.settings);
    this.onChange();
    byId("settings").focus();
  }

  read() {
    for (const { name, kind } of FIELDS) this.settings[name] = kind === "check" ? this.inputs[name].checked : this.inputs[name].value;
    this.clearErrors();
    this.showFormat();
    this.showCount();
    this.onChange();
  }

  showFormat() {
    const { format } = this.settings;
    this.inputs.format_text.closest(".field").hidden = !FORMATS_WITH_TEXT.includes(format);
    for (const name of ["json_schema_mode", "compact_json"]) this.inputs[name].closest(".field").hidden = !asksForJson({ format });
  }

  /** Offer the server's drafters. */
  offerDrafters(drafters) {
    const chains = drafters.length > 1 ? [...drafters, drafters.join(",")] : drafters;
    const options = ["", "none", ...chains].map((choice) => element("option", { value: choice, text: CHOICE_NAMES.draft[choice] ?? choice.replace(",", ", then ") }));
    this.inputs.draft.replaceChildren(...options);
    this.inputs.draft.value = this.settings.draft ?? "";
  }

  /** Take descriptions and limits of the fields from the server's OpenAPI document. */
  async describe() {
    const { components } = await getJson("openapi.json");
    const { properties } = components.schemas.ChatRequest;
    for (const { name, kind, hint } of FIELDS) {
      const property = properties[name];
      if (!property) continue;
      if (!hint) byId(`setting-${name}-hint`).textContent = property.description;
      if (kind === "number") setAttributes(this.inputs[name], { min: property.minimum, max: property.maximum });
    }
  }

  /** Ask the server whether the format is usable, and show its error if not. */
  async checkFormat() {
    const { settings } = this;
    try {
      const fields = { ...toFormatFields(settings), ...(settings.json_schema_mode && { json_schema_mode: settings.json_schema_mode }) };
      if (!Object.keys(toFormatFields(settings)).length) return;
      await getJson("v1/chat/completions", { body: { messages: [{ role: "user", content: "." }], max_tokens: 0, temperature: 0, ...fields } });
    } catch (error) {
      if (settingOf(error.field) === "format_text" || error.field === "format_text") this.showError(error, false);
    }
  }

  clearErrors() {
    for (const [name, input] of Object.entries(this.inputs)) {
      byId(`setting-${name}-error`).textContent = "";
      input.removeAttribute("aria-invalid");
    }
  }

  /** Show an error beside its field, if the form has the field; return whether it has. */
  showError(error, focus = true) {
    const name = this.inputs[error.field] ? error.field : settingOf(error.field);
    if (!name) return false;
    byId(`setting-${name}-error`).textContent = error.message;
    this.inputs[name].setAttribute("aria-invalid", "true");
    if (focus) this.inputs[name].focus();
    return true;
  }
}
