// One answer: asks the model, carries out the tools that it calls, and asks again, until it has ended.
//
// An answer: {id, model, steps, finish, error, leftOut, isAlone, toolless, usage, seconds, rating}. A step is what came of one request:
// {text, thought, tokens, calls}. tokens: [text, logprob, [[text, logprob], ...]] each. calls: {id, name, arguments,
// result, failed}; result is null until it is there. finish: OpenAI's finish_reason, or one of WHY below; "" while it
// is under way. leftOut: how many of the oldest exchanges had no room in the context. toolless: why the model could not
// be offered the tools, in the server's words; empty where it was. isAlone: whether the messages before the question
// were not sent. rating: true for good, false for bad, null for none.

import { Gone, Refused, callTool, stream } from "/chat/server.js";

const NUM_ALTERNATIVES = 5;
const WHY = {
  stop: "It ended by itself.",
  length: "Cut off: it is as long as an answer may be.",
  content_filter: "The server held the rest back.",
  stopped: "You stopped it.",
  gone: "The server was lost.",
  failed: "It failed.",
  rounds: "Ended: it called tools too often.",
  left: "Interrupted: the page was closed or loaded again.",
};

/** Why an answer ended, in words; empty while it is under way. */
export function why(answer) {
  if (!answer.finish) return "";
  const words = WHY[answer.finish] ?? `It ended: ${answer.finish}.`;
  const toolless = answer.toolless && `It was asked without tools: ${answer.toolless}.`;
  return [words, answer.error, toolless].filter(Boolean).join(" ");
}

/** An id; randomUUID is there over HTTPS and on this machine only. */
export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random().toString(36).slice(2)}`;

export function newAnswer(model) {
  return {
    id: newId(), model, steps: [], finish: "", error: "", leftOut: 0, isAlone: false, toolless: "", usage: null,
    seconds: 0, rating: null,
  };
}

const THINK = "<think>";
const THOUGHT = "</think>";

/** What a step thought and what it said: {thought, said}. Models write their thoughts first, and an end behind them;
 * the beginning may be part of their prompt. */
export function partsOf(step) {
  const text = step.text.trimStart();
  const end = text.indexOf(THOUGHT);
  if (!text.startsWith(THINK) && end < 0) return { thought: step.thought, said: step.text };
  const thought = (end < 0 ? text : text.slice(0, end)).replace(THINK, "").trim();
  return { thought: step.thought + thought, said: end < 0 ? "" : text.slice(end + THOUGHT.length).trimStart() };
}

/** What was said in an answer. */
export function textOf(answer) {
  return answer.steps.map((step) => partsOf(step).said).filter(Boolean).join("\n\n");
}

/** Fill an answer to the last of the turns, whose earlier ones are its history. column: whose answers those are.
 * settings: of the model, with its `system` prompt and whether it `isAlone`. tools: definitions. changed: called after every change. Never raises: the answer says how it ended. */
export async function write(answer, turns, { column, settings, tools, maxRounds, signal, changed }) {
  const begin = performance.now();
  answer.isAlone = settings.isAlone && turns.length > 1;
  try {
    for (let round = 0; ; round++) {
      const step = { text: "", thought: "", tokens: [], calls: [] };
      answer.steps.push(step);
      answer.finish = "";
      const finish = await writeStep(step, answer, turns, { column, settings, tools, signal, changed });
      if (!step.calls.length || finish === "length") { // a call that was cut is not carried out
        answer.finish = finish || "stop";
        return;
      }
      if (round === maxRounds) {
        answer.finish = "rounds";
        return;
      }
      for (const call of step.calls) {
        Object.assign(call, await callTool(call.name, call.arguments, signal));
        changed();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else if (error instanceof Gone) answer.finish = "gone";
    else [answer.finish, answer.error] = ["failed", error.message];
    if (!(error instanceof Refused || error instanceof Gone || error.name === "AbortError")) console.error(error);
  } finally {
    answer.seconds = (performance.now() - begin) / 1000;
    changed();
  }
}

/** Stream one step; returns its finish_reason. What has no room in the context is left out, the oldest first; tools
 * that the model cannot be offered are. */
async function writeStep(step, answer, turns, { column, settings, tools, signal, changed }) {
  for (;;) {
    try {
      const offered = answer.toolless ? [] : tools;
      return await readStep(step, answer, bodyOf(answer, turns, { column, settings, tools: offered }), signal, changed);
    } catch (error) {
      const mayLeaveOut = !settings.isAlone && answer.leftOut < turns.length - 1;
      const isFull = error.code === "context_length_exceeded" && mayLeaveOut;
      if (isFull) answer.leftOut += 1;
      else if (error.param === "tools" && !answer.toolless) answer.toolless = error.message;
      else throw error;
    }
  }
}

async function readStep(step, answer, body, signal, changed) {
  let finish = "";
  for await (const event of stream(body, signal)) {
    if (event.usage) answer.usage = added(answer.usage, event.usage);
    const choice = event.choices?.[0];
    if (!choice) continue;
    const delta = choice.delta ?? {};
    step.text += delta.content ?? "";
    step.thought += delta.reasoning_content ?? "";
    for (const piece of delta.tool_calls ?? []) addPiece(step.calls, piece);
    for (const token of choice.logprobs?.content ?? []) step.tokens.push(shortToken(token));
    finish = choice.finish_reason ?? finish;
    changed();
  }
  return finish;
}

function bodyOf(answer, turns, { column, settings, tools }) {
  const body = { model: answer.model, messages: messagesFor(answer, turns, column, settings) };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) {
    if (typeof settings[name] === "number") body[name] = settings[name];
  }
  if (settings.probabilities) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  if (tools.length) body.tools = tools;
  return { ...body, stream_options: { include_usage: true } };
}

/** The messages up to where the answer goes on: the system prompt, earlier turns, the question, its steps so far. */
export function messagesFor(answer, turns, column, { system, isAlone }) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of isAlone ? [] : turns.slice(answer.leftOut, -1)) {
    const said = stepMessages((turn.answers[column] ?? turn.answers[0]).steps);
    // A question without an answer is left out with it: many chat templates refuse two questions in a row.
    if (said.length) messages.push({ role: "user", content: turn.question }, ...said);
  }
  messages.push({ role: "user", content: turns.at(-1).question });
  return [...messages, ...stepMessages(answer.steps.slice(0, -1))];
}

function stepMessages(steps) {
  const messages = [];
  for (const { text, calls } of steps) {
    // A call that was never carried out, as its answer was stopped, is not part of what was said.
    const done = calls.filter((call) => call.result !== null);
    if (!text && !done.length) continue;
    const message = { role: "assistant", content: text };
    if (done.length) {
      message.tool_calls = done.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: asJson(call.arguments) },
      }));
    }
    messages.push(message, ...done.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result })));
  }
  return messages;
}

/** Arguments that are no JSON, as a model may write them, would make the server refuse the conversation for good. */
function asJson(args) {
  try {
    JSON.parse(args);
    return args;
  } catch {
    return JSON.stringify({ text: args });
  }
}

/** A call comes in pieces: its name first, then its arguments, letter by letter. */
function addPiece(calls, piece) {
  const place = piece.index ?? calls.length;
  const call = (calls[place] ??= { id: "", name: "", arguments: "", result: null, failed: false });
  call.id ||= piece.id ?? "";
  call.name += piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

const rounded = (logprob) => Math.round((logprob ?? 0) * 1000) / 1000; // null where the server has none

function shortToken({ token, logprob, top_logprobs: others }) {
  return [token, rounded(logprob), (others ?? []).map((other) => [other.token, rounded(other.logprob)])];
}

/** Of all steps: the tokens that were written. */
function added(before, { completion_tokens: completion = 0 }) {
  return { completion: (before?.completion ?? 0) + completion };
}
