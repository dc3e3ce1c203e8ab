// What the page asks of the server: the OpenAI API, and the routes of the page itself.

const KEY = "nanodag.key";
const SILENCE_MS = 60_000; // of a server that keeps a connection open by a comment every 15 s

/** The server answered, and refused. code: OpenAI's, such as context_length_exceeded; param: the field refused. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message || `the server answered ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
    this.param = error?.param ?? "";
  }
}

/** The server did not answer, or not to the end. */
export class Gone extends Error {}

let keyOfThisPage = ""; // where the storage is closed

export const key = {
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? keyOfThisPage;
    } catch {
      return keyOfThisPage;
    }
  },
  set(text) {
    keyOfThisPage = text;
    try {
      sessionStorage.setItem(KEY, text);
    } catch {
      // kept in this page only
    }
  },
};

async function ask(path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(path, { method, headers, body: JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone();
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refused(response.status, said.error);
}

/** The models that can be talked to, in the server's order: {id, context}. context: tokens of prompt and answer,
 * Infinity where the server does not say. */
export async function models() {
  const { data } = await (await ask("/v1/models", undefined, AbortSignal.timeout(10_000))).json();
  const talking = data.filter((model) => model.has_chat_template !== false);
  return talking.map((model) => ({ id: model.id, context: model.max_model_len ?? Infinity }));
}

/** {tools: [{definition, why_not, is_default}], max_rounds} */
export async function tools() {
  return (await ask("/chat/tools")).json();
}

/** What is known of the models, and where ratings are kept: {models, ratings}. */
export async function about() {
  return (await ask("/chat/about", {})).json();
}

/** Keep a rating; returns its {file}, and the {count} of rows there. */
export async function rate(rating) {
  return (await ask("/chat/rate", rating)).json();
}

/** The result of one call: {result, failed}. */
export async function callTool(name, args, signal) {
  return (await ask("/chat/tool", { name, arguments: args }, signal)).json();
}

/** Markdown as safe HTML. */
export async function html(text) {
  return (await (await ask("/chat/render", { text })).json()).html;
}

/** The next piece of a stream. Raises Gone when it breaks, or nothing comes for long. */
async function readSoon(reader) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Gone()), SILENCE_MS);
  });
  try {
    return await Promise.race([reader.read(), silence]);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Gone();
  } finally {
    clearTimeout(timer);
  }
}

/** The events of a streamed answer. Raises Refused and Gone; AbortError when the signal is. */
export async function* stream(body, signal) {
  const response = await ask("/v1/chat/completions", { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await readSoon(reader);
      if (done) throw new Gone();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // a comment that keeps the connection open, or an empty line
        const data = line.slice("data:".length).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(event.error.status ?? 500, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading stops the answer
  }
}
