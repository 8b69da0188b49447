// What the page keeps in the browser: conversations, the last settings, and the key.
//
// What is read is checked: another version of this page, or a person, may have written it.

const CONVERSATION = "russet.conversation.";
const SETTINGS = "russet.settings";
const KEY = "russet.key";

/** Settings of a request that are numbers, by their names in the API. */
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

/** Conversations that could not be stored; they last as long as the page. */
const unsaved = new Map();

/** A browser may refuse to store anything. */
function storageOf(kind) {
  try {
    return window[kind];
  } catch {
    return null;
  }
}

const local = storageOf("localStorage");
const session = storageOf("sessionStorage");

/** A conversation without messages, with the settings that were used last. */
export function newConversation() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  const id = Array.from(random, (part) => part.toString(36)).join("");
  return { id, title: "", messages: [], settings: lastSettings(), updated: Date.now() };
}

/** An answer of which nothing is there yet. */
export function newAnswer() {
  return readMessage({ role: "assistant" });
}

/** All conversations, the latest first. */
export function allConversations() {
  const found = new Map();
  for (let index = 0; index < (local?.length ?? 0); index += 1) {
    const name = local.key(index);
    if (!name.startsWith(CONVERSATION)) continue;
    const conversation = readConversation(name.slice(CONVERSATION.length), local.getItem(name));
    if (conversation) found.set(conversation.id, conversation);
  }
  for (const [id, conversation] of unsaved) found.set(id, conversation);
  return [...found.values()].sort((a, b) => b.updated - a.updated);
}

/** The conversation with an id, or null. */
export function getConversation(id) {
  return unsaved.get(id) ?? readConversation(id, local?.getItem(CONVERSATION + id));
}

/** Keeps a conversation; false if there is no room for it in the browser's storage. */
export function saveConversation(conversation) {
  const stored = write(local, CONVERSATION + conversation.id, JSON.stringify(conversation));
  if (stored) unsaved.delete(conversation.id);
  else unsaved.set(conversation.id, conversation);
  return stored;
}

export function deleteConversation(id) {
  unsaved.delete(id);
  local?.removeItem(CONVERSATION + id);
}

/** Calls `changed` with the id of a conversation that another tab of this page changed. */
export function onOtherTabs(changed) {
  window.addEventListener("storage", (event) => {
    if (event.key === null) changed(null);
    else if (event.key.startsWith(CONVERSATION)) changed(event.key.slice(CONVERSATION.length));
  });
}

export function lastSettings() {
  return readSettings(parse(local?.getItem(SETTINGS)));
}

export function saveLastSettings(settings) {
  write(local, SETTINGS, JSON.stringify(settings));
}

/** The server's key, and whether it is kept beyond this tab. */
export function getKey() {
  return session?.getItem(KEY) ?? local?.getItem(KEY) ?? "";
}

export function saveKey(key, isKept) {
  forgetKey();
  return write(isKept ? local : session, KEY, key);
}

export function forgetKey() {
  session?.removeItem(KEY);
  local?.removeItem(KEY);
}

function write(storage, name, text) {
  if (!storage) return false;
  try {
    storage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

function parse(text) {
  try {
    return JSON.parse(text ?? "null");
  } catch {
    return null;
  }
}

const string = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : null);

function readConversation(id, text) {
  const value = parse(text);
  if (!Array.isArray(value?.messages)) return null;
  return {
    id,
    title: string(value.title),
    messages: value.messages.map(readMessage).filter((message) => message !== null),
    settings: readSettings(value.settings),
    updated: number(value.updated) ?? 0,
  };
}

function readMessage(value) {
  if (value?.role === "user") return { role: "user", content: string(value.content) };
  if (value?.role !== "assistant") return null;
  const calls = Array.isArray(value.calls) ? value.calls : [];
  return {
    role: "assistant",
    content: string(value.content),
    reasoning: string(value.reasoning),
    thought: number(value.thought),
    calls: calls.map((call) => ({ name: string(call?.name), arguments: string(call?.arguments) })),
    end: string(value.end),
    error: string(value.error),
    usage: readUsage(value.usage),
  };
}

function readUsage(value) {
  if (!value) return null;
  const usage = {};
  for (const name of ["prompt", "cached", "generated", "rate"]) usage[name] = number(value[name]);
  return usage;
}

function readSettings(value) {
  const settings = { system: string(value?.system), thinking: string(value?.thinking) };
  for (const name of NUMBERS) {
    if (number(value?.[name]) !== null) settings[name] = value[name];
  }
  return settings;
}
