// The wire: what is asked of the server, and its answer as it comes.
//
//   models(key)                     -> the records of /v1/models
//   answer(body, key, signal)       -> yields chunks of /v1/chat/completions
//   add(message, delta)             a delta added to the message that it belongs to
//
// What goes wrong is a Failure with a kind: key (401, 403), busy (429, 503), refused (another status, or an error
// inside the stream), unreachable (nothing came), lost (the stream broke off).

export class Failure extends Error {
  constructor(kind, message, wait = null) {
    super(message);
    this.kind = kind;
    this.wait = wait; // seconds after which the server wants to be asked again
  }
}

export async function models(key) {
  const response = await ask("v1/models", { headers: headers(key) });
  return (await response.json()).data ?? [];
}

// Kimi's own list of models says `supports_image_in`; other servers list `input_modalities`.
export const sees = (model) => model?.supports_image_in === true || (model?.input_modalities ?? []).includes("image");

export async function* answer(body, key, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await ask("v1/chat/completions", { method: "POST", headers: headers(key), body: JSON.stringify(asked), signal });
  let ended = false;
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure("refused", chunk.error.message ?? "The server ended the answer with an error.");
    ended ||= Boolean(chunk.choices?.[0]?.finish_reason);
    yield chunk;
  }
  if (!ended) throw new Failure("lost", "The connection was lost before the answer was complete. What came is kept.");
}

export function add(message, delta) {
  for (const name of ["reasoning_content", "content"]) {
    if (typeof delta[name] === "string") message[name] = (message[name] ?? "") + delta[name];
  }
  for (const { index, id, function: said } of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += said?.name ?? "";
    call.function.arguments += said?.arguments ?? "";
  }
}

// ---------------------------------------------------------------------- below

const headers = (key) => ({ "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) });

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("unreachable", "The server cannot be reached.");
  }
  if (response.ok) return response;
  throw refusal(response, await said(response));
}

function refusal(response, message) {
  const wait = Number(response.headers.get("Retry-After")) || 5;
  if ([401, 403].includes(response.status)) return new Failure("key", message || "The server wants an API key.");
  if ([429, 503].includes(response.status)) return new Failure("busy", message || "The server is busy.", wait);
  return new Failure("refused", message || `The server answered ${response.status} ${response.statusText}.`);
}

async function said(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message;
}

// The data of server-sent events; comments, which keep a connection alive, are passed over.
async function* events(stream, signal) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      if (signal.aborted) throw error;
      return { done: true };
    });
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
