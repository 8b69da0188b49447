// The page: which conversation is open, what is being answered, and everything that can be pressed.

import { ApiError, chat, models } from "./api.js";
import * as store from "./conversations.js";
import { element, icon } from "./dom.js";
import { AnswerView, userView } from "./message.js";

/** Milliseconds between two savings of an answer that grows. */
const SAVING = 1000;
/** Characters of an answer that are read out when it is finished. */
const READ_OUT = 1500;
/** Characters of a title that is made of a message. */
const TITLE = 60;

const $ = (id) => document.getElementById(id);
const input = $("input");
const scroller = $("scroller");

let key = store.getKey();
/** The model's object in /v1/models, once it is known. */
let model = null;
let conversation;
/** The views of the answers that are shown, by message. */
let views = new Map();
/** What is being answered, by the id of the conversation: `{ conversation, message, controller }`. */
const answers = new Map();

// Conversations

/** Opens the conversation that the address names, or a new one. */
function openFromAddress() {
  const id = location.hash.slice(1);
  const found = id === "" ? null : find(id);
  if (!found) setAddress("", "replaceState");
  open(found ?? store.newConversation());
}

/** A conversation as it is now: while it is answered, that is more than what is stored. */
function find(id) {
  return answers.get(id)?.conversation ?? store.getConversation(id);
}

function setAddress(id, how) {
  history[how](null, "", location.pathname + location.search + (id && `#${id}`));
}

function open(opened) {
  conversation = opened;
  showMessages();
  showState();
  scrollToLatest();
}

function openNew() {
  setAddress("", "pushState");
  open(store.newConversation());
  closeSidebar();
  focusInput();
}

function save(saved) {
  saved.updated = Date.now();
  const full = "This browser has no room for the conversation: it is lost when the page is closed. Delete others.";
  notify(store.saveConversation(saved) ? "" : full);
}

async function rename(id) {
  const renamed = find(id);
  const field = $("rename").querySelector("input");
  field.value = renamed?.title ?? "";
  if (!(await ask($("rename"))) || !renamed || field.value.trim() === "") return;
  renamed.title = field.value.trim();
  if (id === conversation.id) conversation.title = renamed.title;
  save(renamed);
  showState();
}

async function remove(id) {
  $("delete-name").textContent = find(id)?.title ?? "";
  if (!(await ask($("delete")))) return;
  const answering = answers.get(id);
  answers.delete(id);
  answering?.controller.abort();
  store.deleteConversation(id);
  if (id === conversation.id) openNew();
  else showState();
}

function listItem({ id, title }) {
  const link = element("a", { href: `#${id}`, dir: "auto" }, title);
  if (id === conversation.id) link.setAttribute("aria-current", "page");
  link.addEventListener("click", closeSidebar);
  const button = (name, label, press) => {
    const made = element("button", { type: "button", className: "icon", "aria-label": `${label} ${title}` });
    made.append(icon(name));
    made.addEventListener("click", () => press(id));
    return made;
  };
  const item = element("li", {}, link, button("rename", "Rename", rename), button("delete", "Delete", remove));
  item.classList.toggle("answering", answers.has(id));
  return item;
}

/** Shows everything that depends on which conversations there are and what they do, save the messages. */
function showState() {
  const { title, messages, id } = conversation;
  $("title").textContent = title || "New conversation";
  document.title = title ? `${title} – Russet` : "Russet";
  $("welcome").hidden = messages.length > 0;
  $("send").hidden = answers.has(id);
  $("stop").hidden = !answers.has(id);
  $("conversations").replaceChildren(...store.allConversations().map(listItem));
}

// Messages

function showMessages() {
  views = new Map();
  const shown = conversation.messages.map((message) => {
    if (message.role === "user") return userView(message, (text) => edit(message, text));
    const view = new AnswerView(message, regenerate);
    views.set(message, view);
    showAnswer(message);
    return view.root;
  });
  $("messages").replaceChildren(...shown);
}

function showAnswer(message) {
  const isAnswering = answers.get(conversation.id)?.message === message;
  views.get(message)?.update(isAnswering, message === conversation.messages.at(-1));
}

/** Asks the model, in the open conversation. */
function send(text) {
  conversation.messages.push({ role: "user", content: text });
  conversation.title ||= text.trim().split("\n", 1)[0].slice(0, TITLE);
  if (location.hash !== `#${conversation.id}`) setAddress(conversation.id, "replaceState");
  answer(conversation);
}

/** Another answer in place of the last one. */
function regenerate() {
  if (answers.has(conversation.id)) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  answer(conversation);
  focusInput();
}

/** Asks something else at the place of a message; what followed is dropped. */
function edit(message, text) {
  stop();
  conversation.messages.splice(conversation.messages.indexOf(message));
  send(text);
  focusInput();
}

function stop() {
  answers.get(conversation.id)?.controller.abort();
}

/** The messages as the model gets them: those of one speaker in a row are one, since templates want turns. */
function requestMessages({ messages, settings }) {
  const turns = settings.system.trim() === "" ? [] : [{ role: "system", content: settings.system }];
  for (const { role, content } of messages) {
    if (content === "") continue;
    if (turns.at(-1)?.role === role) turns.at(-1).content += `\n\n${content}`;
    else turns.push({ role, content });
  }
  return turns;
}

async function answer(asked) {
  const { system: _, thinking, ...numbers } = asked.settings;
  const body = {
    ...(model && { model: model.id }),
    messages: requestMessages(asked),
    stream: true,
    stream_options: { include_usage: true },
    // What the templates of models that reason know; others have no use for it.
    ...(thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
    ...numbers,
  };
  const message = store.newAnswer();
  const controller = new AbortController();
  const answering = { conversation: asked, message, controller };
  // Not any more once the conversation is deleted, or the message edited that this answers.
  const isCurrent = () => answers.get(asked.id) === answering;
  asked.messages.push(message);
  answers.set(asked.id, answering);
  save(asked);
  showMessages();
  showState();
  scrollToLatest();
  say("Answering");
  const show = throttled(() => {
    if (asked !== conversation) return;
    showAnswer(message);
    follow();
  });
  let isRefused = false;
  try {
    await receive(message, body, controller.signal, () => {
      show();
      if (isCurrent() && Date.now() - asked.updated > SAVING) save(asked);
    });
  } catch (error) {
    if (controller.signal.aborted) message.end = "stopped";
    else message.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
    isRefused = error.status === 401;
  }
  show.cancel();
  if (!isCurrent()) return;
  answers.delete(asked.id);
  save(asked);
  showState();
  if (asked === conversation) {
    showAnswer(message);
    follow();
    say(message.error === "" ? `Answer: ${views.get(message).plainText.slice(0, READ_OUT)}` : "");
  }
  if (isRefused && (await askKey(message.error)) && asked === conversation) regenerate();
  else if (model === null && message.error === "") loadModel();
}

/** Fills an answer with what the server streams. */
async function receive(message, body, signal, changed) {
  const began = performance.now();
  let [first, last] = [null, null];
  for await (const chunk of chat(body, key, signal)) {
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    if (delta.reasoning_content) {
      message.reasoning += delta.reasoning_content;
      message.thought = (performance.now() - began) / 1000;
    }
    if (delta.content) message.content += delta.content;
    for (const call of delta.tool_calls ?? []) {
      const known = (message.calls[call.index ?? 0] ??= { name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      last = performance.now();
      first ??= last;
    }
    if (choice?.finish_reason) message.end = choice.finish_reason;
    if (chunk.usage) {
      const { prompt_tokens: prompt, completion_tokens: generated, prompt_tokens_details: details } = chunk.usage;
      const seconds = (last - first) / 1000;
      const rate = generated > 1 && seconds > 0 ? (generated - 1) / seconds : null;
      message.usage = { prompt, cached: details?.cached_tokens ?? 0, generated, rate };
    }
    changed();
  }
}

/** Calls `run` with the next picture, and less often when it takes long. */
function throttled(run) {
  let frame = 0;
  let notBefore = 0;
  const tick = (now) => {
    if (now < notBefore) {
      frame = requestAnimationFrame(tick);
      return;
    }
    frame = 0;
    const began = performance.now();
    run();
    notBefore = now + 4 * (performance.now() - began);
  };
  const schedule = () => {
    if (frame === 0) frame = requestAnimationFrame(tick);
  };
  schedule.cancel = () => cancelAnimationFrame(frame);
  return schedule;
}

// Scrolling

/** Whether what comes is followed: until the reader scrolls up. */
let isFollowing = true;

function follow() {
  if (isFollowing) scroller.scrollTop = scroller.scrollHeight;
  showLatest();
}

function scrollToLatest() {
  isFollowing = true;
  follow();
}

function showLatest() {
  $("latest").hidden = isFollowing;
}

scroller.addEventListener("scroll", () => {
  isFollowing = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
  showLatest();
});
$("latest").addEventListener("click", () => {
  scrollToLatest();
  focusInput();
});

// Words for the user

function notify(text) {
  $("notice").textContent = text;
  $("notice").hidden = text === "";
}

/** Has a screen reader say something. */
function say(text) {
  $("status").textContent = text;
  clearTimeout(say.timer);
  // Nobody should come across it later.
  say.timer = setTimeout(() => ($("status").textContent = ""), 5000);
}

/** Opens a dialog; true if it is confirmed. */
function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
    dialog.showModal();
    dialog.querySelector("input")?.select();
  });
}

for (const button of document.querySelectorAll("dialog .cancel")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
for (const dialog of document.querySelectorAll("dialog")) {
  // A press beside the dialog is one on the dialog itself, which its form covers.
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

// Key and model

/** Asks for the key, saying why; true if there is one now. */
async function askKey(reason) {
  if ($("key").open) return false;
  const { key: field, keep } = $("key").querySelector("form").elements;
  $("key-reason").textContent = reason;
  field.value = "";
  if (!(await ask($("key")))) return false;
  const typed = field.value.trim();
  field.value = "";
  // What else there is can't be in a header.
  if (!/^[!-~]+$/.test(typed)) return askKey("A key has visible ASCII characters without spaces.");
  key = typed;
  store.saveKey(key, keep.checked);
  loadModel();
  return true;
}

async function loadModel() {
  try {
    [model = null] = await models(key);
  } catch (error) {
    if (error.status === 401) await askKey(error.message);
    else notify(error.message);
    return;
  }
  notify("");
  $("model").textContent = model?.id ?? "";
  const context = model?.context_length;
  const facts = [model?.id, context && `context of ${context.toLocaleString("en")} tokens`];
  if (model?.fidelity) facts.push(`fidelity ${model.fidelity}`);
  $("facts").textContent = facts.filter(Boolean).join(" · ");
}

// Settings

const settingsForm = $("settings").querySelector("form");

function showSettings() {
  const { settings } = conversation;
  settingsForm.elements.system.value = settings.system;
  settingsForm.elements.thinking.value = settings.thinking;
  for (const name of store.NUMBERS) settingsForm.elements[name].value = settings[name] ?? "";
  $("forget-key").hidden = key === "";
  $("settings").showModal();
}

function changeSettings() {
  const { system, thinking } = settingsForm.elements;
  const settings = { system: system.value, thinking: thinking.value };
  for (const name of store.NUMBERS) {
    const field = settingsForm.elements[name];
    if (field.value !== "" && field.validity.valid) settings[name] = field.valueAsNumber;
  }
  conversation.settings = settings;
  store.saveLastSettings(settings);
  if (conversation.messages.length > 0) save(conversation);
}

settingsForm.addEventListener("input", changeSettings);
$("open-settings").addEventListener("click", showSettings);
$("reset-settings").addEventListener("click", () => {
  settingsForm.reset();
  changeSettings();
});
$("forget-key").addEventListener("click", () => {
  key = "";
  store.forgetKey();
  $("forget-key").hidden = true;
});

// The list on a narrow screen

function openSidebar() {
  document.body.classList.add("sidebar-open");
  $("open-sidebar").setAttribute("aria-expanded", "true");
  $("scrim").hidden = false;
  document.querySelector("main").inert = true;
  $("close-sidebar").focus();
}

function closeSidebar() {
  if (!document.body.classList.contains("sidebar-open")) return;
  document.body.classList.remove("sidebar-open");
  $("open-sidebar").setAttribute("aria-expanded", "false");
  $("scrim").hidden = true;
  document.querySelector("main").inert = false;
  $("open-sidebar").focus();
}

$("open-sidebar").addEventListener("click", openSidebar);
$("close-sidebar").addEventListener("click", closeSidebar);
$("scrim").addEventListener("click", closeSidebar);
matchMedia("(min-width: 48rem)").addEventListener("change", closeSidebar);
$("new").addEventListener("click", openNew);

// The message box

/** As high as its text, up to what the style allows. */
function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

function sendInput() {
  const text = input.value;
  if (text.trim() === "" || answers.has(conversation.id)) return;
  input.value = "";
  fitInput();
  send(text);
  focusInput();
}

const isTouch = () => matchMedia("(pointer: coarse)").matches;

/** Goes to the message box, save where that brings up a keyboard over half of the screen. */
function focusInput() {
  if (!isTouch()) input.focus();
}

input.addEventListener("input", fitInput);
input.addEventListener("keydown", (event) => {
  // Input methods confirm with Enter what they compose. On a touch screen it is the only way to begin a line.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || isTouch()) return;
  event.preventDefault();
  sendInput();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  sendInput();
});
$("stop").addEventListener("click", () => {
  stop();
  focusInput();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  // The address names the conversation.
  event.preventDefault();
  input.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("sidebar-open")) closeSidebar();
  else stop();
});

// The page's own life

window.addEventListener("popstate", openFromAddress);
window.addEventListener("pagehide", () => {
  // The browser ends their requests now, which is no failure of theirs.
  for (const { conversation } of answers.values()) store.saveConversation(conversation);
  answers.clear();
});
window.addEventListener("pageshow", (event) => event.persisted && openFromAddress());
store.onOtherTabs((id) => {
  const stored = id === conversation.id && !answers.has(id) ? store.getConversation(id) : null;
  if (stored) open(stored);
  else showState();
});

openFromAddress();
loadModel();
