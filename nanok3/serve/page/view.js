// How one turn looks: who speaks, folded reasoning, text, pictures, calls and their results, badges, buttons.
//
//   item(turn, act)             -> a list item for it
//   update(item, state, act)    -> the same with what has changed since; what a user unfolds, selects or types stays
//
// state = {words: how an answer under way stands, else null; last: whether it is the last turn}
// act   = what buttons do: edit(turn, text), regenerate(turn), goOn(), sendResults(calls, texts)

import { codeBlock, copyText, element, show } from "./markup.js";
import { picturesOf, textOf } from "./store.js";

const SHORTEST = 50; // ms of an answer that has a speed
const WHO = { user: "You", assistant: "Answer", tool: "Result" };
const ENDS = {
  length: "stopped at the token limit",
  stopped: "stopped by you",
  lost: "connection lost",
  failed: "ended by an error",
};

export function item(turn, act) {
  const { message } = turn;
  const made = element("li", { className: `turn ${message.role}`, turn });
  const who = element("h2", { textContent: message.role === "tool" ? `Result of ${message.name ?? message.tool_call_id}` : WHO[message.role] });
  const body = element("div", { className: "text body", dir: "auto" });
  const calls = element("div", { className: "calls" });
  made.append(who, ...pictureList(message), body, calls, element("div", { className: "foot" }));
  if (message.role === "assistant") who.after(folded());
  if (message.role === "user") body.append(element("p", { className: "plain", textContent: textOf(message) }));
  if (message.role === "tool") body.append(codeBlock(pretty(textOf(message)), message.tool_call_id));
  update(made, { words: null, last: false }, act);
  return made;
}

const folded = () => element("details", { className: "thought", hidden: true }, element("summary"), element("div", { className: "text", dir: "auto" }));

function pictureList(message) {
  const all = picturesOf(message).map(({ url, name }, k) => element("img", { src: url, alt: `Picture ${k + 1} of this message${name ? `, ${name}` : ""}` }));
  return all.length ? [element("div", { className: "pictures" }, ...all)] : [];
}

export function update(made, state, act) {
  const { turn } = made;
  const done = turn.message.role === "assistant" ? answerText(made, turn, state) : [];
  const calls = turn.message.tool_calls ?? [];
  const wanted = state.last && state.words === null;
  part(made, ".calls", [calls, wanted && calls.length], () => calls.length && callCards(calls, wanted, act));
  part(made, ".foot", [turn.note, state, calls.length], () => foot(made, state, act));
  return done;
}

// Build a part anew only if what it shows is another thing.
function part(made, name, shown, build) {
  const node = made.querySelector(`:scope > ${name}`);
  const key = JSON.stringify(shown);
  if (node.key === key) return;
  node.key = key;
  node.replaceChildren(...[build() || []].flat());
}

function answerText(made, { message, note }, { words }) {
  const thought = made.querySelector(".thought");
  thought.hidden = !message.reasoning_content;
  const thinks = words !== null && !note.thought;
  const seconds = note.first && ((note.thought ?? note.last) - note.first) / 1000;
  thought.firstChild.textContent = thinks ? "Thinking" : `Thought for ${seconds ? duration(seconds) : "a while"}`;
  thought.classList.toggle("busy", thinks);
  show(thought.lastChild, message.reasoning_content ?? "");
  return show(made.querySelector(".body"), textOf(message));
}

const duration = (seconds) => (seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`);

// ---------------------------------------------------------------------- calls

function callCards(calls, wanted, act) {
  const cards = calls.map((call) => {
    const said = element("div", { className: "call" }, element("h3", { textContent: call.function.name }), codeBlock(pretty(call.function.arguments), call.id));
    if (wanted) said.append(element("label", {}, `Result of ${call.id}`, element("textarea", { className: "code", rows: 2, spellcheck: false })));
    return said;
  });
  if (!wanted) return cards;
  const form = element("form", { className: "results" }, ...cards, element("button", { className: "main", textContent: calls.length > 1 ? "Send the results" : "Send the result" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act.sendResults(calls, Array.from(form.querySelectorAll("textarea"), (field) => field.value));
  });
  return form;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// ---------------------------------------------------------------------- under a turn

function foot(made, { words, last }, act) {
  const { turn } = made;
  if (words !== null) return element("span", { className: "busy", textContent: words });
  const { message, note } = turn;
  const buttons = [];
  const button = (textContent, action) => {
    const one = element("button", { type: "button", textContent });
    one.addEventListener("click", () => action(one));
    buttons.push(one);
  };
  if (textOf(message)) button("Copy", (one) => copyText(textOf(message), one));
  button("Edit", () => edit(made, act));
  if (message.role === "assistant") button("Again", () => act.regenerate(turn));
  const cut = last && note.finish in ENDS && message.content && !message.tool_calls;
  if (cut) button("Continue", () => act.goOn());
  return [...badges(note), element("span", { className: "buttons" }, ...buttons)];
}

export function badges({ usage, asked, first, last, finish, edited }) {
  const found = [];
  const badge = (className, textContent, title) => found.push(element("span", { className: `badge ${className}`, textContent, title }));
  if (finish in ENDS) badge("ended", ENDS[finish], "Why the answer ended");
  if (edited) badge("edited", "edited", "You have changed this text");
  if (first) badge("first", `first token ${duration((first - asked) / 1000)}`, "Time from sending to the first token");
  if (!usage) return found;
  const { prompt_tokens: prompt, completion_tokens: said } = usage;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? usage.cached_tokens ?? 0;
  const rate = ((said - 1) * 1000) / (last - first);
  if (said > 1 && last - first >= SHORTEST) badge("rate", `${rate < 100 ? rate.toFixed(1) : number(Math.round(rate))} tokens/s`, "After the first token");
  badge("said", `${number(said)} tokens`, `Tokens of the answer, ${number(usage.completion_tokens_details?.reasoning_tokens ?? 0)} of them reasoning`);
  badge("cached", `${number(cached)} of ${number(prompt)} cached`, "Tokens of the prompt that the server had not to read again");
  return found;
}

const number = (count) => count.toLocaleString("en");

function edit(made, act) {
  const { turn } = made;
  const field = element("textarea", { value: textOf(turn.message), className: turn.message.role === "tool" ? "code" : "", ariaLabel: "Text of the message" });
  const cancel = element("button", { type: "button", textContent: "Cancel" });
  const form = element("form", { className: "edit" }, field, cancel, element("button", { className: "main", textContent: turn.message.role === "assistant" ? "Save" : "Save and ask again" }));
  const close = () => {
    form.remove();
    made.classList.remove("editing");
    made.querySelector(".foot button")?.focus();
  };
  cancel.addEventListener("click", close);
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape") event.stopPropagation();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    close();
    act.edit(turn, field.value);
  });
  made.classList.add("editing");
  made.append(form);
  field.rows = Math.min(20, field.value.split("\n").length + 1);
  field.focus();
}
