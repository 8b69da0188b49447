// The server's API: errors with its own words, and answers as they stream.

/** After how many milliseconds without a byte a stream is lost; the server sends comments every ten seconds. */
const SILENCE = 45_000;

/** A request that failed: `status` is that of the response, if there was one. */
export class ApiError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

/** The models of the server. */
export async function models(key) {
  const response = await request("v1/models", { headers: authorization(key) });
  const list = await response.json().catch(() => null);
  if (!Array.isArray(list?.data)) throw new ApiError("The server's list of models cannot be read.");
  return list.data;
}

/** The chunks of a chat completion. Ends in order, or throws: ApiError, or AbortError once `signal` is aborted. */
export async function* chat(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization(key) },
    body: JSON.stringify(body),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = parse(data);
      if (chunk.error) throw new ApiError(String(chunk.error.message ?? "The answer failed."));
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError("The connection to the server was lost.");
  }
  throw new ApiError("The connection to the server ended before the answer did.");
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  let response;
  try {
    // Relative, so that the page also works below a proxy's path.
    response = await fetch(path, { ...options, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message;
  throw new ApiError(message ? String(message) : `The server answered with status ${response.status}.`, response.status);
}

function parse(data) {
  try {
    const value = JSON.parse(data);
    if (value !== null && typeof value === "object") return value;
  } catch {
    // The same as any other value that is no object.
  }
  throw new ApiError("The server sent an event that cannot be read.");
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await inTime(reader.read());
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    // Closes the connection, which ends the request at the server. It may be closed already.
    reader.cancel().catch(() => {});
  }
}

function inTime(promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new ApiError("The server has been silent for too long.")), SILENCE);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
