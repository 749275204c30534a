// Getting an answer into a conversation: ask, take chunks in, wait for a busy server, end well whatever happens.
//
//   reply(conversation, {model, goOn, changed, soon})   one more turn, or more of the last one
//   stop(conversation)                                  as far as it has come
//
// Each conversation may have one answer under way; it goes on while another conversation is shown.

import * as store from "./store.js";
import { Failure, add, answer } from "./talk.js";

const MAX_TRIES = 5; // of a busy server
const underWay = new Map(); // id of a conversation -> {controller, words: how the answer stands}
export const failures = new Map(); // id of a conversation -> Failure

export const words = ({ id }) => underWay.get(id)?.words ?? null;
export const stop = ({ id }) => underWay.get(id)?.controller.abort();

// Nothing that the model could read back.
export const isHollow = ({ message }) => message.role === "assistant" && !message.content && !message.reasoning_content && !message.tool_calls;

function requestOf(conversation, model, goOn) {
  const { effort, temperature, top_p, max_completion_tokens, seed, tools, tool_choice } = conversation.settings;
  const messages = store.messages(conversation);
  if (goOn) messages.push({ ...messages.pop(), partial: true });
  const thinking = effort === "off" ? { type: "disabled" } : { type: "enabled", effort };
  const body = { model, messages, thinking };
  const given = { temperature, top_p, max_completion_tokens, seed };
  for (const [name, value] of Object.entries(given)) if (value !== null) body[name] = value;
  return tools.trim() ? { ...body, tools: JSON.parse(tools), tool_choice } : body;
}

// `changed` is called when an answer begins, waits or has ended, `soon` after each chunk.
export async function reply(conversation, { model, goOn = false, changed, soon }) {
  stop(conversation);
  const body = requestOf(conversation, model, goOn);
  const mine = { controller: new AbortController(), words: "Waiting for the first token" };
  const turn = { message: { role: "assistant", content: null }, note: { model } };
  if (goOn) turn.message = structuredClone(conversation.turns.at(-1).message);
  if (body.thinking.type === "enabled") turn.message.reasoning_content ??= ""; // not the same as none, see the spec
  conversation.turns = [...conversation.turns.slice(0, goOn ? -1 : undefined), turn];
  underWay.set(conversation.id, mine);
  failures.delete(conversation.id);
  changed();
  try {
    await receive(turn, body, mine, changed, soon);
  } catch (error) {
    turn.note.finish = mine.controller.signal.aborted ? "stopped" : error.kind === "lost" ? "lost" : "failed";
    if (turn.note.finish !== "stopped") failures.set(conversation.id, failureOf(error));
  }
  if (underWay.get(conversation.id) === mine) underWay.delete(conversation.id);
  complete(turn);
  if (isHollow(turn) && turn.note.finish in { stopped: 1, lost: 1, failed: 1 }) conversation.turns = conversation.turns.filter((one) => one !== turn);
  changed(turn);
}

const failureOf = (error) => (error instanceof Failure ? error : new Failure("page", `The answer could not be read: ${error.message}`));

async function receive(turn, body, mine, changed, soon) {
  const { signal } = mine.controller;
  for (let tries = 1; ; tries += 1) {
    turn.note.asked = Date.now();
    try {
      for await (const chunk of answer(body, store.key(), signal)) {
        mine.words = take(turn, chunk) ?? mine.words;
        soon();
      }
      return;
    } catch (error) {
      if (error.kind !== "busy" || tries === MAX_TRIES) throw error;
      await wait(error, mine, changed);
    }
  }
}

function take({ message, note }, chunk) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  note.usage = chunk.usage ?? choice?.usage ?? note.usage;
  note.finish = choice?.finish_reason ?? note.finish;
  add(message, delta);
  if (!delta.reasoning_content && !delta.content && !delta.tool_calls) return null;
  note.last = Date.now();
  note.first ??= note.last;
  if (!delta.reasoning_content) note.thought ??= note.last;
  return delta.reasoning_content ? "Thinking" : "Answering";
}

async function wait(failure, mine, changed) {
  const { signal } = mine.controller;
  for (let left = Math.ceil(failure.wait); left > 0; left -= 1) {
    mine.words = `${failure.message} Trying again in ${left} s`;
    changed();
    await new Promise((done) => {
      setTimeout(done, 1000);
      signal.addEventListener("abort", done, { once: true });
    });
    signal.throwIfAborted();
  }
  mine.words = "Waiting for the first token";
}

// Calls that broke off cannot be answered, and go.
function complete({ message, note }) {
  if (note.finish !== "tool_calls" && message.tool_calls) {
    const whole = message.tool_calls.filter((call) => isObject(call?.function.arguments));
    if (whole.length) message.tool_calls = whole;
    else delete message.tool_calls;
  }
  if (note.finish === "stop") message.content ??= "";
}

function isObject(text) {
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
}
