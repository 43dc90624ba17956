// Makes elements. Text is always text: nothing here parses HTML.

/**
 * Return a new element.
 * @param {string} tag
 * @param {Record<string, any>} [attributes] also on… for listeners, `class` and `text`; false and null are left out
 * @param {...(Node | string | null | undefined | false)} children
 * @returns {any}
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else if (name === "value") node.value = value;
    else if (name in { checked: 1, hidden: 1, disabled: 1, open: 1 }) node[name] = value;
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
}

/** Return a button with a label, or with a sign and a label for screen readers. */
export function button(label, onclick, { sign, ...attributes } = {}) {
  const names = sign ? { "aria-label": label, title: label } : {};
  return element("button", { type: "button", onclick, ...names, ...attributes }, sign ? element("span", { "aria-hidden": "true" }, sign) : label);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** Return the element of the page with this id; throws if there is none. */
export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`The page has no #${id}.`);
  return /** @type {any} */ (node);
}

let announcing = 0;

/** Announce a text to screen readers; of several texts within 100 ms only the last. */
export function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => (byId("announcer").textContent = text), 100);
}

/** Show a sentence for some seconds, with an optional button. */
export function notify(text, action = null) {
  const toast = byId("toast");
  const dismiss = () => toast.replaceChildren();
  const doAction = action && button(action.label, () => (dismiss(), action.run()));
  toast.replaceChildren(element("span", { text }), ...(doAction ? [doAction] : []), button("Dismiss", dismiss, { sign: "✕" }));
  clearTimeout(notify.timer);
  notify.timer = setTimeout(dismiss, action ? 12_000 : 7_000);
}

export async function copyText(text, what = "Copied.") {
  try {
    await navigator.clipboard.writeText(text);
    announce(what);
    return true;
  } catch {
    notify("The browser doesn't let the page copy; select the text instead.");
    return false;
  }
}
