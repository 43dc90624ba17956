// The messages on the screen: messages in view are formatted, others are plain text.

import { byId } from "./dom.js";
import { MessageView } from "./message_view.js";

const NEAR_END = 60; // pixels
const DRAWING_MS = 40; // milliseconds between two drawings of a growing answer

export class Transcript {
  constructor(actions) {
    this.actions = actions;
    this.views = new Map(); // views of the shown messages
    this.known = new WeakMap(); // views also of messages on other branches, with their open parts
    this.root = byId("messages");
    this.scroller = byId("scroller");
    this.follows = true;
    this.frame = 0;
    this.drawnAt = 0;
    this.observer = new IntersectionObserver((entries) => this.enrichVisible(entries), { root: this.scroller, rootMargin: "800px" });
    this.scroller.addEventListener("scroll", () => this.noteScroll(), { passive: true });
    byId("to-end").addEventListener("click", () => this.goToEnd());
  }

  /** Show a path of messages; views of earlier shown messages are reused. */
  show(path) {
    const views = new Map();
    for (const message of path) {
      let view = this.known.get(message);
      if (!view) this.known.set(message, (view = new MessageView(message, this.actions)));
      if (!view.isRich) this.observer.observe(view.node);
      else if (!view.growing) view.showSurroundings();
      views.set(message.id, view);
    }
    for (const [id, view] of this.views) if (views.get(id) !== view) this.observer.unobserve(view.node);
    this.views = views;
    this.root.replaceChildren(...[...views.values()].map((view) => view.node));
    byId("welcome").hidden = path.length > 0;
    for (const view of [...views.values()].slice(-6)) view.enrich();
    requestAnimationFrame(() => this.isNearEnd() && (byId("to-end").hidden = true)); // a shorter transcript causes no scroll event
  }

  view(id) {
    return this.views.get(id);
  }

  /** Show the branches and buttons of a message again. */
  refresh(id) {
    const view = this.views.get(id);
    if (!view?.isRich || view.growing) return;
    view.showWhole();
    view.showActions();
  }

  enrichVisible(entries) {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      this.views.get(target.dataset.id)?.enrich();
      this.observer.unobserve(target);
    }
  }

  /** Draw the growing answer, in some of the frames: the others are left for scrolling. */
  scheduleGrowth(view) {
    this.frame ||= requestAnimationFrame((now) => {
      this.frame = 0;
      if (!view.growing) return;
      if (now - this.drawnAt < DRAWING_MS) {
        this.scheduleGrowth(view);
        return;
      }
      this.drawnAt = now;
      if (!view.grow()) this.scheduleGrowth(view);
      if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
    });
  }

  /** Draw the rest of a finished answer, frame by frame. */
  async finishGrowth(view) {
    while (!view.grow()) await new Promise(requestAnimationFrame);
    view.endGrowth();
    if (this.follows) this.goToEnd();
  }

  isNearEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    return scrollTop + clientHeight > scrollHeight - NEAR_END;
  }

  noteScroll() {
    this.follows = this.isNearEnd();
    byId("to-end").hidden = this.follows;
  }

  goToEnd() {
    this.follows = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    byId("to-end").hidden = true;
  }

  /** Move the focus from the focused message to the message before or after it. */
  focusNeighbour(step) {
    const nodes = [...this.root.children];
    const index = nodes.findIndex((node) => node.contains(document.activeElement));
    const next = nodes[index < 0 ? (step < 0 ? nodes.length - 1 : 0) : index + step];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  }
}
