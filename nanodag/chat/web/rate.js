// Ratings: the rows that a stage of kind `preference` reads, made of answers and what they were answers to.

import { messagesFor } from "/chat/answer.js";
import { fullName, ratings, systemOf } from "/chat/facts.js";
import { rate } from "/chat/server.js";

const isPlain = (messages) => messages.every((message) => message.role !== "tool" && !message.tool_calls);

/** What is rated of an answer: its text; empty for one that has none, calls tools, or is under way. */
function saidIn(answer) {
  const [step, ...more] = answer.steps;
  return answer.id && answer.finish && step && !more.length && !step.calls.length ? step.text : "";
}

/** The messages that an answer was an answer to. */
function promptOf(turns, column, settings) {
  const answer = turns.at(-1).answers[column];
  return messagesFor({ ...answer, steps: [] }, turns, column, {
    system: systemOf(settings, answer.model), isAlone: answer.isAlone,
  });
}

/** Whether an answer may be called good or bad. */
export function isRatable(turns, column, settings) {
  const answer = turns.at(-1).answers[column];
  return ratings() !== "" && saidIn(answer) !== "" && isPlain(promptOf(turns, column, settings));
}

/** Whether one of two answers may be called the better one: they are different answers to the same. */
export function isPair(turns, settings) {
  const { answers } = turns.at(-1);
  if (answers.length !== 2 || !answers.every((_, column) => isRatable(turns, column, settings))) return false;
  const [one, other] = answers.map((_, column) => JSON.stringify(withoutSystem(promptOf(turns, column, settings))));
  return one === other && saidIn(answers[0]) !== saidIn(answers[1]);
}

const message = (content) => [{ role: "assistant", content }];
const withoutSystem = (messages) => messages.filter((message) => message.role !== "system");

/** Call an answer good or bad; null takes it back. Returns what the server says. */
export function rateAnswer(turns, column, settings, label) {
  const answer = turns.at(-1).answers[column];
  const prompt = promptOf(turns, column, settings);
  const row = { prompt, completion: message(saidIn(answer)), label, models: [fullName(answer.model)] };
  return rate({ id: answer.id, kind: "thumbs", row: label === null ? null : row });
}

/** Call the answer of a column the better one; null takes it back. */
export function ratePair(turns, settings, better) {
  const { answers } = turns.at(-1);
  const prompts = answers.map((_, column) => promptOf(turns, column, settings));
  const isSame = JSON.stringify(prompts[0]) === JSON.stringify(prompts[1]); // else their system prompts differ
  const best = better ?? 0;
  const [chosen, rejected] = [answers[best], answers[1 - best]];
  const row = {
    prompt: isSame ? prompts[0] : withoutSystem(prompts[0]), chosen: message(saidIn(chosen)),
    rejected: message(saidIn(rejected)), models: [fullName(chosen.model), fullName(rejected.model)],
  };
  return rate({ id: `${answers[0].id}-${answers[1].id}`, kind: "pairs", row: better === null ? null : row });
}
