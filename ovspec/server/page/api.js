// Requests to the server. Paths are relative, so the page works below any path of a proxy.

const KEY = "ovspec-key"; // kept until the tab is closed

/** An error response. `field`: the wrong field of the request. */
export class ApiError extends Error {
  constructor(message, status, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

let askForKey = async () => null;

/** @param {(wrong: boolean) => Promise<string | null>} ask asks the user for the API key; null if they give none */
export function onKeyNeeded(ask) {
  let asking = null;
  askForKey = () => (asking ??= ask(sessionStorage.getItem(KEY) !== null).finally(() => (asking = null)));
}

async function readError(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, error.param);
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, response.status);
  }
}

/** Send a request and return the response; throws ApiError for an error response. */
export async function send(path, { body = null, signal = undefined } = {}) {
  for (;;) {
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server can't be reached; see whether it still runs.", 0);
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await readError(response);
    const newKey = await askForKey();
    if (!newKey) throw new ApiError("The server needs an API key.", 401);
    sessionStorage.setItem(KEY, newKey);
  }
}

export async function getJson(path, options) {
  return (await send(path, options)).json();
}

/** Yield the events of a stream; throws ApiError if it ends with an error or too early. */
export async function* streamEvents(path, body, signal) {
  const response = await send(path, { body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isWhole = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done && isWhole) return;
      if (done) throw new ApiError("The connection ended before the answer did.", 0);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") {
          isWhole = true; // read the rest, too: otherwise the server counts the client as disconnected
          continue;
        }
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new ApiError(event.error.message, 0, event.error.param);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
