// What the browser keeps: each conversation under a key of its own, the theme, and the key of the server.
//
//   conversation = {id, created, changed, settings, turns: [{message, note}, ...]}
//
// `message` is what the API reads; `note` is what only this page knows of it: usage, times, how it ended.

export const PREFIX = "nanok3.conversation.";

export const DEFAULTS = {
  effort: "max",
  system: "",
  temperature: null,
  top_p: null,
  max_completion_tokens: null,
  seed: null,
  tools: "",
  tool_choice: "auto",
};

export function create(settings) {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, created: now, changed: now, settings: { ...DEFAULTS, ...settings }, turns: [] };
}

export function all() {
  const found = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)).map((name) => read(name));
  return found.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

export const load = (id) => read(PREFIX + id);

// A record that is damaged, by hand or by another version, is passed over and left where it is.
function read(name) {
  try {
    const found = JSON.parse(localStorage.getItem(name));
    if (!Array.isArray(found?.turns) || !found.id) return null;
    const last = found.turns.at(-1);
    if (last?.message.role === "assistant") last.note.finish ??= "lost"; // it was under way when the page went
    return { ...found, settings: { ...DEFAULTS, ...found.settings } };
  } catch {
    return null;
  }
}

// False if the browser has no room; the conversation then lives as long as the page.
export function save(conversation) {
  const { id, created, changed, settings, turns } = conversation;
  try {
    localStorage.setItem(PREFIX + id, JSON.stringify({ id, created, changed, settings, turns }));
    return true;
  } catch {
    return false;
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);

export function title({ turns }) {
  const first = turns.find(({ message }) => message.role === "user");
  return first ? (textOf(first.message).trim().split("\n")[0].slice(0, 80) || "A picture") : "New conversation";
}

export function textOf({ content }) {
  const parts = Array.isArray(content) ? content : [{ type: "text", text: content ?? "" }];
  return parts.filter((part) => part.type === "text").map((part) => part.text).join("\n");
}

export function picturesOf({ content }) {
  const parts = (Array.isArray(content) ? content : []).filter((part) => part.type === "image_url");
  return parts.map(({ image_url: { url }, name }) => ({ url, name }));
}

// What can be sent as it is, to any server of this API.
export function exported(conversation, model) {
  const { tools, effort, ...sampling } = conversation.settings;
  const saved = new Date().toISOString();
  return { format: "nanok3-chat-1", model, saved, settings: { ...sampling, effort, tools }, messages: messages(conversation) };
}

export function messages({ settings, turns }) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return [...system, ...turns.map(({ message }) => sent(message))];
}

// The names of pictures are for the reader of this page.
function sent(message) {
  if (!Array.isArray(message.content)) return message;
  return { ...message, content: message.content.map(({ name, ...part }) => part) };
}

// The key: in the tab, or, if it is to be kept, in the browser.
export const key = () => sessionStorage.getItem("nanok3.key") ?? localStorage.getItem("nanok3.key") ?? "";
export const keyIsKept = () => localStorage.getItem("nanok3.key") !== null;

export function setKey(value, keep) {
  for (const place of [sessionStorage, localStorage]) place.removeItem("nanok3.key");
  if (value) (keep ? localStorage : sessionStorage).setItem("nanok3.key", value);
}
