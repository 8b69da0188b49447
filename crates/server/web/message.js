// How a message is shown.

import { copyButton, element } from "./dom.js";
import { MarkdownView, renderCode } from "./markdown.js";

const whole = new Intl.NumberFormat("en");
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

const ENDS = {
  stopped: "Stopped",
  length: "Cut at the limit of tokens",
  "": "Interrupted",
};

/** A message of the user. `onEdit` gets the new text. */
export function userView(message, onEdit) {
  const text = element("div", { className: "bubble", dir: "auto" }, message.content);
  const edit = element("button", { type: "button", className: "quiet" }, "Edit");
  const copy = copyButton("Copy your message", () => message.content);
  const actions = element("div", { className: "actions" }, edit, copy);
  const root = element("article", { className: "user" }, element("h2", { className: "hidden" }, "You"));
  root.append(text, actions);
  edit.addEventListener("click", () => {
    const form = editor(message.content, (changed) => {
      if (changed === null) {
        form.replaceWith(text, actions);
        edit.focus();
      } else onEdit(changed);
    });
    text.remove();
    actions.replaceWith(form);
    form.querySelector("textarea").focus();
  });
  return root;
}

/** A form around a text; `done` gets the changed text, or null. */
function editor(text, done) {
  const area = element("textarea", { value: text, rows: Math.min(text.split("\n").length + 1, 12) });
  area.setAttribute("aria-label", "Edit your message");
  const cancel = element("button", { type: "button", className: "text" }, "Cancel");
  const send = element("button", { className: "primary" }, "Send");
  const form = element("form", { className: "editor" }, area);
  form.append(element("div", { className: "actions" }, cancel, send));
  const submit = () => area.value.trim() !== "" && done(area.value);
  cancel.addEventListener("click", () => done(null));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      done(null);
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  });
  return form;
}

/** A message of the model, which may still grow. */
export class AnswerView {
  root = element("article", { className: "assistant" }, element("h2", { className: "hidden" }, "Answer"));
  #message;
  #summary = element("summary");
  #thoughts = element("div", { className: "thoughts", dir: "auto" });
  #reasoning = element("details", { className: "reasoning", hidden: true }, this.#summary, this.#thoughts);
  #calls = element("div", { className: "calls" });
  #text = element("div", { className: "markdown", dir: "auto" });
  #markdown = new MarkdownView(this.#text);
  #waiting = element("div", { className: "waiting", "aria-hidden": "true" }, element("i"), element("i"), element("i"));
  #problem = element("div", { className: "problem", hidden: true });
  #facts = element("span", { className: "faint facts" });
  #copy = copyButton("Copy the answer", () => this.#message.content);
  #again = element("button", { type: "button", className: "quiet" }, "Regenerate");
  #foot = element("div", { className: "actions" });

  /** `onAgain` asks for another answer in place of this one. */
  constructor(message, onAgain) {
    this.#message = message;
    this.#again.addEventListener("click", onAgain);
    this.#foot.append(this.#copy, this.#again, this.#facts);
    this.root.append(this.#reasoning, this.#text, this.#calls, this.#waiting, this.#problem, this.#foot);
    this.#problem.addEventListener("click", (event) => event.target.tagName === "BUTTON" && onAgain());
  }

  /** What the answer says, without marks and buttons. */
  get plainText() {
    const text = this.#text.cloneNode(true);
    for (const head of text.querySelectorAll(".code-head")) head.remove();
    for (const block of text.querySelectorAll("p, li, pre, th, td, br, h3, h4, h5, h6")) block.after("\n");
    return text.textContent.trim();
  }

  /** Shows the message as it is now. `isLast` if nothing follows it. */
  update(isAnswering, isLast) {
    const { content, reasoning, thought, calls, error } = this.#message;
    this.#reasoning.hidden = reasoning === "";
    if (this.#thoughts.textContent !== reasoning) this.#thoughts.textContent = reasoning;
    const isThinking = isAnswering && content === "" && calls.length === 0;
    const time = thought < 1 ? "less than a second" : `${tenths.format(thought)} s`;
    const label = thought === null ? "Reasoning" : `Thought for ${time}`;
    this.#summary.textContent = isThinking ? "Thinking…" : label;
    this.#markdown.update(content);
    this.#calls.replaceChildren(...calls.map(callView));
    this.#waiting.hidden = !isAnswering;
    this.root.setAttribute("aria-busy", String(isAnswering));
    this.#problem.hidden = error === "" || isAnswering;
    if (this.#problem.hidden) this.#problem.replaceChildren();
    else if (this.#problem.childElementCount === 0) {
      const retry = element("button", { type: "button", className: "primary" }, "Try again");
      this.#problem.append(element("p", { role: "alert" }, error), ...(isLast ? [retry] : []));
    }
    this.#foot.hidden = isAnswering;
    this.#copy.hidden = content === "";
    this.#again.hidden = !isLast || error !== "";
    this.#facts.textContent = facts(this.#message);
  }
}

function callView({ name, arguments: text }) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Not whole yet, or not JSON: as it is.
  }
  const summary = element("summary", {}, "Calls the tool ", element("code", {}, name));
  return element("details", { className: "call", open: true }, summary, renderCode("", shown));
}

function facts({ usage, end, error }) {
  const parts = [];
  if (error === "" && end in ENDS) parts.push(ENDS[end]);
  if (usage) {
    parts.push(`${whole.format(usage.generated)} tokens`);
    if (usage.rate !== null) parts.push(`${tenths.format(usage.rate)} tokens/s`);
    parts.push(`${whole.format(usage.prompt)} in the prompt, ${whole.format(usage.cached)} of them cached`);
  }
  return parts.join(" · ");
}
