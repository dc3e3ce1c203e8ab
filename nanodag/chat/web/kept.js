// Conversations and settings in the browser's storage: one entry for each conversation, so that two tabs do not
// overwrite each other's.
//
// A conversation: {id, title, updated, models: [name, name or ""], settings, turns}. A turn: {question, answers}, with
// an answer for each column. answer.js says what an answer is.

const CONVERSATION = "nanodag.chat/";
const SETTINGS = "nanodag.settings";
const THEME = "nanodag.theme";

export const FULL = "The browser's storage is full: this conversation is lost when the page closes. Delete older ones.";
export const CLOSED = "The browser keeps nothing for this page: conversations are lost when it closes.";

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null; // storage is closed to this page, or somebody else wrote there
  }
}

/** Why a value could not be kept; empty where it was. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return "";
  } catch (error) {
    return error.name === "QuotaExceededError" ? FULL : CLOSED;
  }
}

function isConversation(found) {
  return typeof found?.id === "string" && Array.isArray(found.turns) && Array.isArray(found.models);
}

/** All conversations, the newest first. */
export function conversations() {
  let names = [];
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(CONVERSATION));
  } catch {
    // storage is closed to this page: there are none
  }
  return names.map(read).filter(isConversation).sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation. Where the storage is full, the probabilities of others go first, those of the oldest before
 * all. Returns what the reader must know, empty where all is well. */
export function keep(conversation) {
  const name = CONVERSATION + conversation.id;
  let problem = write(name, conversation);
  if (problem !== FULL) return problem;
  for (const other of conversations().reverse()) {
    if (other.id === conversation.id || !hasTokens(other)) continue;
    write(CONVERSATION + other.id, withoutTokens(other));
    problem = write(name, conversation);
    if (!problem) return "";
  }
  return write(name, withoutTokens(conversation));
}

export function forget(id) {
  try {
    localStorage.removeItem(CONVERSATION + id);
  } catch {
    // it was never kept
  }
}

/** Call `changed` with a conversation's id when another tab has kept or forgotten it, and with what is kept now. */
export function watch(changed) {
  window.addEventListener("storage", ({ key }) => {
    if (!key?.startsWith(CONVERSATION)) return;
    const found = read(key);
    changed(key.slice(CONVERSATION.length), isConversation(found) ? found : null);
  });
}

export const settings = { get: () => read(SETTINGS), set: (value) => write(SETTINGS, value) };
export const theme = { get: () => read(THEME) ?? "", set: (value) => write(THEME, value) };

function steps(conversation) {
  return conversation.turns.flatMap((turn) => turn.answers.flatMap((answer) => answer.steps));
}

function hasTokens(conversation) {
  return steps(conversation).some((step) => step.tokens.length);
}

function withoutTokens(conversation) {
  const copy = structuredClone(conversation);
  for (const step of steps(copy)) step.tokens = [];
  return copy;
}
