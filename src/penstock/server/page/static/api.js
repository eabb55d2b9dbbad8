// Talking to the server: JSON, server-sent events over fetch (an EventSource could carry no key), and errors with names.

const KEY = "penstock.key";

/** What went wrong, in the server's own words if it gave any. */
export class ApiError extends Error {
  constructor(status, message, code = "", param = "") {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** The API key that requests carry; kept until the tab is closed. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return keyInMemory;
  }
}

let keyInMemory = "";

export function setApiKey(key) {
  keyInMemory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    return; // the browser refused: the key stays in memory
  }
}

async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = apiKey();
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.", "unreachable");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let error = null;
  try {
    ({ error } = await response.json());
  } catch {
    error = null; // not our error object: for example a proxy's page
  }
  if (error && typeof error.message === "string") {
    return new ApiError(response.status, error.message, error.code ?? "", error.param ?? "");
  }
  return new ApiError(response.status, `The server answered with status ${response.status}.`);
}

export async function getJson(path) {
  return (await request(path)).json();
}

/** The `data` of each event of a stream, as text (WHATWG HTML, "Interpreting an event stream"). */
export async function* events(path, options = {}) {
  const response = await request(path, options);
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += decoder.decode(value, { stream: true });
      // A carriage return at the very end may be half of a line break: it waits for the next piece.
      const lines = buffer.split(/\r\n|\n|\r(?!$)/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw cutShort(); // browsers name this error differently, and none says what it means here
  } finally {
    reader.cancel().catch(() => {}); // already closed by an abort: nothing is left to cancel
  }
}

/**
 * The chunks of one streamed chat completion. If the server sends an error instead of a chunk, throws it.
 * Each chunk holds the usage so far: if an answer is stopped, the usage at its end never comes.
 */
export async function* chatChunks(body, signal) {
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  };
  for await (const data of events("v1/chat/completions", options)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message, chunk.error.code ?? "");
    yield chunk;
  }
  throw cutShort();
}

function cutShort() {
  return new ApiError(200, "The connection ended before the answer did.", "cut_short");
}
