// The chat page: what is shown, and what each key and button does.
//
//   send, edit, again  ->  the turns of a conversation change  ->  reply() adds one  ->  draw()
//
// A conversation is a list of turns (store.js), and the page is drawn from it. Lists of turns are replaced, not changed:
// what an edit cuts off stays whole, and "Undo" brings it back as long as the page is open.

import { failures, isHollow, reply, stop, words } from "./answers.js";
import { element } from "./markup.js";
import { MAX_PICTURES, picturesIn } from "./pictures.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { models, sees } from "./talk.js";
import { item, update } from "./view.js";

const $ = (id) => document.getElementById(id);
const THEMES = ["system", "light", "dark"];
const touch = matchMedia("(pointer: coarse)");

const conversations = new Map(store.all().map((one) => [one.id, one]));
let current = [...conversations.values()][0] ?? store.create();
let known = []; // models of the server
let unknown = null; // Failure to list them
let pictures = []; // {url, name}, to go with the next message
const undos = []; // {restore, again}

// ---------------------------------------------------------------------- turns

const model = () => known.find(({ id }) => id === $("model").value) ?? known[0];

function ask(conversation, goOn = false) {
  $("said").replaceChildren();
  const changed = (ended) => {
    if (ended && conversations.has(conversation.id)) keep(conversation);
    if (conversation === current) draw(ended);
    else drawConversations();
  };
  reply(conversation, { model: model()?.id ?? "default", goOn, changed, soon: () => drawSoon(conversation) });
}

// Put other turns behind the first `count`, and ask for an answer to them. What was there can be brought back.
function replace(count, turns, why, asks = true) {
  const conversation = current;
  stop(conversation);
  let other = conversation.turns;
  failures.delete(conversation.id);
  conversation.turns = [...other.slice(0, count), ...turns];
  if (other.length > count) {
    const exchange = () => {
      stop(conversation);
      [conversation.turns, other] = [other.filter((turn) => !isHollow(turn)), conversation.turns];
      failures.delete(conversation.id);
      keep(conversation);
      choose(conversation);
    };
    undoable(why, exchange, exchange);
  }
  conversation.changed = Date.now();
  keep(conversation);
  if (asks) ask(conversation);
  else draw();
}

function send() {
  const text = $("prompt").value;
  if (words(current) !== null || (!text.trim() && !pictures.length)) return;
  const parts = pictures.map(({ url, name }) => ({ type: "image_url", image_url: { url }, name }));
  const content = parts.length ? [...parts, ...(text.trim() ? [{ type: "text", text }] : [])] : text;
  $("prompt").value = "";
  $("notice").hidden = true;
  pictures = [];
  drawPictures();
  grow();
  replace(current.turns.length, [{ message: { role: "user", content }, note: {} }]);
  toTheEnd();
}

const act = {
  goOn: () => ask(current, true),
  regenerate: (turn) => replace(current.turns.indexOf(turn), [], "The answer was replaced."),
  edit: (turn, text) => {
    const { message, note } = turn;
    const kept = Array.isArray(message.content) ? message.content.filter((part) => part.type !== "text") : [];
    const content = kept.length ? [...kept, ...(text ? [{ type: "text", text }] : [])] : text;
    const changed = { message: { ...message, content }, note: { ...note, edited: true } };
    const at = current.turns.indexOf(turn);
    const behind = current.turns.length - at - 1;
    replace(at, [changed], behind ? "The message was changed; what followed it is gone." : "The message was changed.", message.role !== "assistant");
  },
  sendResults: (calls, texts) => {
    const turns = calls.map((call, k) => ({
      message: { role: "tool", tool_call_id: call.id, name: call.function.name, content: texts[k] },
      note: {},
    }));
    replace(current.turns.length, turns);
    $("prompt").focus();
  },
};

// ---------------------------------------------------------------------- conversations

function keep(conversation) {
  const wanted = conversation.turns.length > 0;
  if (wanted) conversations.set(conversation.id, conversation);
  else conversations.delete(conversation.id);
  if (!wanted) store.remove(conversation.id);
  else if (!store.save(conversation)) notice("The browser has no room for this conversation: it ends with the page. Export it to keep it.");
  drawConversations();
}

function choose(conversation) {
  current = conversation;
  pictures = [];
  $("effort").value = current.settings.effort;
  menu(false);
  drawPictures();
  drawConversations();
  draw();
  toTheEnd();
}

const newest = () => [...conversations.values()].sort((a, b) => b.changed - a.changed);

function begin() {
  choose(store.create(current.settings));
  $("prompt").focus();
}

function forget(conversation) {
  stop(conversation);
  conversations.delete(conversation.id);
  store.remove(conversation.id);
  if (conversation === current) choose(newest()[0] ?? store.create(current.settings));
  else drawConversations();
  $("new").focus();
}

function remove(conversation) {
  forget(conversation);
  const restore = () => {
    keep(conversation);
    choose(conversation);
  };
  undoable("The conversation was deleted.", restore, () => forget(conversation));
}

function exportCurrent() {
  const text = JSON.stringify(store.exported(current, model()?.id ?? null), null, 1);
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const name = store.title(current).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  element("a", { href, download: `nanok3-${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

function undoable(why, restore, again) {
  undos.push({ restore, again });
  $("undo").disabled = false;
  notice(why, "Undo", undo);
}

function undo() {
  const last = undos.pop();
  last.restore();
  $("undo").disabled = !undos.length;
  notice("Brought back.", "Redo", () => {
    last.again();
    undoable("Done again.", last.restore, last.again);
  });
  $("prompt").focus();
}

function notice(text, name = "", action = null) {
  const [said, button] = $("notice").children;
  said.textContent = text;
  button.textContent = name;
  button.hidden = !action;
  button.onclick = action;
  $("notice").hidden = false;
}

// ---------------------------------------------------------------------- drawing

let frame = 0;

function drawSoon(conversation) {
  if (conversation === current) frame ||= requestAnimationFrame(() => draw());
}

// `ended`: the turn that has just come to its end.
function draw(ended = null) {
  cancelAnimationFrame(frame);
  frame = 0;
  const follows = atTheEnd;
  const { turns } = current;
  const list = $("turns");
  let same = 0;
  while (same < turns.length && list.children[same]?.turn === turns[same]) same += 1;
  while (list.children.length > same) list.lastElementChild.remove();
  for (const turn of turns.slice(same)) list.append(item(turn, act));
  for (const [k, turn] of turns.entries()) {
    const last = k === turns.length - 1;
    const state = { words: last ? words(current) : null, last };
    const texts = update(list.children[k], state, act);
    if (state.words !== null) announce(list.children[k], texts.slice(0, -1));
    if (turn === ended) announce(list.children[k], texts);
  }
  drawFrame();
  if (follows) toTheEnd();
}

function drawFrame() {
  const busy = words(current) !== null;
  $("empty").hidden = current.turns.length > 0;
  $("log").setAttribute("aria-busy", busy);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("title").textContent = store.title(current);
  document.title = `${store.title(current)} – nanok3`;
  drawFailure();
}

function drawFailure() {
  const failure = failures.get(current.id) ?? unknown;
  const key = failure && `${current.id} ${failure.message}`;
  if ($("failure").key === key) return;
  $("failure").key = key;
  $("failure").replaceChildren();
  if (!failure) return;
  const again = element("button", { type: "button", textContent: "Try again", onclick: tryAgain });
  const enter = failure.kind === "key" && element("button", { type: "button", textContent: "Enter the key", onclick: () => settings.open(current, "key") });
  $("failure").append(element("p", { textContent: failure.message }), ...(enter ? [enter] : []), again);
}

async function tryAgain() {
  if (unknown) await listModels();
  const last = current.turns.at(-1);
  if (unknown || !failures.has(current.id)) return;
  if (last.message.role === "assistant") act.regenerate(last);
  else ask(current);
}

// Paragraphs are read out when they are complete: a region that changes with every token cannot be listened to.
function announce(shown, texts) {
  for (const text of texts.slice(shown.said ?? 0)) $("said").append(element("p", { textContent: text }));
  shown.said = Math.max(shown.said ?? 0, texts.length);
}

function drawConversations() {
  const rows = newest().map((one) => {
    const name = store.title(one);
    const open = element("button", { className: "open", textContent: name, title: name, onclick: () => choose(one) });
    if (one === current) open.setAttribute("aria-current", "true");
    if (words(one) !== null) open.classList.add("busy");
    const gone = element("button", { className: "delete", textContent: "×", title: "Delete", ariaLabel: `Delete ${name}`, onclick: () => remove(one) });
    return element("li", {}, open, gone);
  });
  $("conversations").replaceChildren(...rows);
}

function drawPictures() {
  const rows = pictures.map(({ url: src, name }, k) => {
    const gone = element("button", { type: "button", textContent: "×", ariaLabel: `Remove picture ${k + 1}, ${name}` });
    gone.onclick = () => {
      pictures.splice(k, 1);
      drawPictures();
      $("prompt").focus();
    };
    return element("li", {}, element("img", { src, alt: `Picture ${k + 1}, ${name}`, title: name }), gone);
  });
  $("pictures").replaceChildren(...rows);
}

// Whoever reads the end stays there, when more comes and when the window or a phone's keyboard takes room.
let atTheEnd = true;
const toTheEnd = () => ($("log").scrollTop = $("log").scrollHeight);

function onScroll() {
  const { scrollHeight, scrollTop, clientHeight } = $("log");
  atTheEnd = scrollHeight - scrollTop - clientHeight < 80;
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${Math.min($("prompt").scrollHeight + 2, innerHeight * 0.4)}px`;
}

function menu(open) {
  $("menu").setAttribute("aria-expanded", open);
  if (open) $("new").focus();
}

// ---------------------------------------------------------------------- the server, and pictures for it

async function listModels() {
  try {
    known = await models(store.key());
    unknown = null;
  } catch (failure) {
    unknown = failure;
  }
  const chosen = $("model").value;
  $("model").replaceChildren(...known.map(({ id }) => element("option", { textContent: id, selected: id === chosen })));
  $("model").disabled = known.length < 2;
  $("attach").hidden = !sees(model());
  drawFailure();
}

async function take(files) {
  if (!files.length) return;
  if (!sees(model())) return notice("This model does not see pictures.");
  const conversation = current;
  const { found, wrong } = await picturesIn(files);
  if (conversation !== current) return; // they were meant for another one
  pictures = [...pictures, ...found];
  const room = MAX_PICTURES - current.turns.flatMap(({ message }) => store.picturesOf(message)).length;
  if (pictures.length > room) wrong.push(`A conversation holds at most ${MAX_PICTURES} pictures.`);
  if (wrong.length) notice(wrong.join(" "));
  pictures = pictures.slice(0, room);
  drawPictures();
  $("prompt").focus();
}

// ---------------------------------------------------------------------- keys and buttons

function onKey(event) {
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
    event.preventDefault();
    if (!$("settings").open) begin();
  }
  if (event.key !== "Escape" || $("settings").open || event.isComposing) return;
  if ($("menu").getAttribute("aria-expanded") === "true") {
    menu(false);
    $("menu").focus();
  } else stop(current);
}

// On a touch screen Enter begins a line: there is no Shift to do it with.
function onPromptKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch.matches) return;
  event.preventDefault();
  send();
}

function theme(chosen) {
  localStorage.setItem("nanok3.theme", chosen === "system" ? "" : chosen);
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  $("theme").textContent = `Theme: ${chosen}`;
}

const themeNow = () => document.documentElement.dataset.theme ?? "system";

// Another tab has changed a conversation.
function onStorage({ key }) {
  const id = key?.startsWith(store.PREFIX) && key.slice(store.PREFIX.length);
  if (!id || (conversations.has(id) && words(conversations.get(id)) !== null)) return;
  const stored = store.load(id);
  if (!stored && id !== current.id) conversations.delete(id);
  if (stored) conversations.set(id, Object.assign(conversations.get(id) ?? stored, stored));
  drawConversations();
  if (id === current.id) draw();
}

document.addEventListener("keydown", onKey);
$("prompt").addEventListener("keydown", onPromptKey);
$("prompt").addEventListener("input", grow);
$("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("stop").addEventListener("click", () => (stop(current), $("prompt").focus()));
$("new").addEventListener("click", begin);
$("export").addEventListener("click", exportCurrent);
$("undo").addEventListener("click", undo);
$("menu").addEventListener("click", () => menu($("menu").getAttribute("aria-expanded") !== "true"));
$("log").addEventListener("click", () => menu(false));
$("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(themeNow()) + 1) % 3]));
$("model").addEventListener("change", () => ($("attach").hidden = !sees(model())));
$("effort").addEventListener("change", () => {
  current.settings.effort = $("effort").value;
  if (current.turns.length) keep(current);
});
$("open-settings").addEventListener("click", () => settings.open(current));
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await take([...$("file").files]);
  $("file").value = "";
});
document.addEventListener("paste", (event) => take([...event.clipboardData.files]));
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  $("composer").classList.toggle("drop", sees(model()) && event.dataTransfer.types.includes("Files"));
});
document.addEventListener("dragleave", (event) => event.relatedTarget ?? $("composer").classList.remove("drop"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("composer").classList.remove("drop");
  take([...event.dataTransfer.files]);
});
$("log").addEventListener("scroll", onScroll);
new ResizeObserver(() => atTheEnd && toTheEnd()).observe($("log"));
addEventListener("storage", onStorage);
addEventListener("online", () => unknown && listModels());
// What has come of an answer is kept when the page goes.
addEventListener("pagehide", () => newest().forEach((one) => words(one) !== null && store.save(one)));

settings.connect({
  changed: () => current.turns.length && keep(current),
  newKey: listModels,
});
$("theme").textContent = `Theme: ${themeNow()}`;
choose(current);
listModels();
if (!touch.matches) $("prompt").focus();
