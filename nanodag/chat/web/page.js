// The page: which conversation is open, what is under way in it, and whether the server is there.

import { newAnswer, newId, textOf, why, write } from "/chat/answer.js";
import * as facts from "/chat/facts.js";
import * as kept from "/chat/kept.js";
import { isPair, isRatable, rateAnswer, ratePair } from "/chat/rate.js";
import { Refused, about, key, models, tools } from "/chat/server.js";
import { drawShelf, exportShown, inOrder } from "/chat/shelf.js";
import { Speaker } from "/chat/speaker.js";
import { button, copyText, drawTurn, el, hideHint, isSendKey } from "/chat/view.js";

const LOOK_MS = 15_000; // how often the server is looked after while all is well
const LOOK_GONE_MS = 2_000;
const KEEP_MS = 2_000;
const NEAR_END = 80; // pixels
const TITLE_LENGTH = 60;
const SYSTEMS = ["system", "system-1"]; // fields, one a column
const THEMES = { "": "Auto", light: "Light", dark: "Dark" };
const DEFAULTS = {
  system: "", temperature: 0.8, max_tokens: 512, top_p: null, top_k: null, seed: null, tools: null, probabilities: true,
  history: false, unseenTools: false,
};

const at = (id) => document.getElementById(id);
const page = {
  served: [], // models, as models() has them
  tools: [], // as tools() has them
  maxRounds: 0,
  linked: [], // models that the address named
  isGone: false,
  isLeft: false, // about to be closed or loaded again
  all: new Map(), // id to conversation
  open: null,
  views: [], // of the open conversation: for each turn its answers' views
  running: new Map(), // id to the controllers that stop its answers
  notices: { server: "", storage: "", link: "" },
};
const speaker = new Speaker(at("read-out"));

// ---- conversations

function newConversation() {
  const settings = { ...DEFAULTS, ...kept.settings.get() };
  const before = page.open?.models ?? ["", ""];
  return { id: newId(), title: "", updated: 0, models: [...before], settings, turns: [] };
}

/** Take a conversation as it was kept. */
function take(found) {
  found.settings = { ...DEFAULTS, ...found.settings };
  for (const answer of found.turns.flatMap((turn) => turn.answers)) answer.finish ||= "left";
  page.all.set(found.id, found);
}

/** Another tab has kept a conversation, or forgotten it where nothing was found. */
function takeOther(id, found) {
  if (page.running.has(id)) return;
  if (found) take(found);
  else page.all.delete(id);
  if (id === page.open.id) show(found ?? newConversation());
  else drawList();
}

function keep(conversation) {
  if (!page.all.has(conversation.id)) return; // nothing was said yet, or it was deleted
  if (page.isLeft) return; // what the browser ends now is kept as it was
  conversation.updated = Date.now();
  notice("storage", kept.keep(conversation));
}

function show(conversation) {
  page.open = conversation;
  drawAll();
  drawList();
  drawModels();
  isAtEnd = true;
  followEnd();
}

function forget(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  stop(conversation);
  page.running.delete(conversation.id);
  page.all.delete(conversation.id);
  kept.forget(conversation.id);
  notice("storage", "");
  if (page.open === conversation) show(inOrder(page.all)[0] ?? newConversation());
  else drawList();
}

function drawList() {
  drawShelf(page.all, page.open, { show: (one) => (closeShelf(), show(one)), forget });
}

function drawAll() {
  hideHint();
  const drawn = page.open.turns.map((turn, place) => drawTurn(turn, actionsAt(place)));
  page.views = drawn.map((one) => one.views);
  at("talk").replaceChildren(...(drawn.length ? drawn.map((one) => one.root) : [invitation()]));
  drawState();
}

/** What an empty conversation shows: prompts that the pipeline tries its models with. */
function invitation() {
  const prompts = facts.promptsFor(page.open.models).map((prompt) => button(prompt, () => ask(prompt)));
  const group = el("div", { class: "prompts", role: "group", "aria-label": "Prompts of the pipeline" }, ...prompts);
  const words = prompts.length ? "Say something to the model, or try:" : "Say something to the model.";
  return el("div", { class: "empty" }, el("p", {}, words), ...(prompts.length ? [group] : []));
}

function actionsAt(place) {
  const isLast = place === page.open.turns.length - 1;
  return {
    edit: (text) => ask(text, place),
    regenerate: isLast ? (column) => regenerate(column) : undefined,
    ratings: (column) => ratingsOf(page.open, place, column),
  };
}

/** The ratings that an answer may have, for its view. */
function ratingsOf(conversation, place, column) {
  const turns = conversation.turns.slice(0, place + 1);
  const turn = turns.at(-1);
  const { settings } = conversation;
  const answer = turn?.answers[column];
  if (!answer || !isRatable(turns, column, settings)) return [];
  const press = (holder, name, value, send) => async () => {
    const before = holder[name];
    holder[name] = before === value ? null : value;
    updateViews(place);
    try {
      const { file, count } = await send(holder[name]);
      keep(conversation);
      return `${holder[name] === null ? "Taken back" : "Kept"}: ${count} in ${file}`;
    } catch (error) {
      holder[name] = before;
      updateViews(place);
      return `The rating was not kept: ${error.message || "the server does not answer"}.`;
    }
  };
  const send = (label) => rateAnswer(turns, column, settings, label);
  const shown = [["Good", "Good answer", true], ["Bad", "Bad answer", false]].map(([words, name, label]) => {
    return { words, name, isPressed: answer.rating === label, press: press(answer, "rating", label, send) };
  });
  if (!isPair(turns, settings)) return shown;
  const prefer = press(turn, "better", column, (better) => ratePair(turns, settings, better));
  return [{ words: "Better", name: "The better of both", isPressed: turn.better === column, press: prefer }, ...shown];
}

function updateViews(place) {
  for (const view of page.views[place] ?? []) view.update();
}

/** What depends on whether an answer is under way. */
function drawState() {
  const isRunning = page.running.has(page.open.id);
  at("send").hidden = isRunning;
  at("stop").hidden = !isRunning;
}

// ---- questions and answers

/** Ask, after the first `place` turns; later ones are dropped. */
function ask(question, place = page.open.turns.length) {
  const conversation = page.open;
  stop(conversation);
  conversation.turns.length = place;
  if (place === 0) conversation.title = question.trim().slice(0, TITLE_LENGTH);
  const columns = conversation.models.filter(Boolean);
  conversation.turns.push({ question, answers: (columns.length ? columns : [""]).map(newAnswer) });
  page.all.set(conversation.id, conversation);
  answerAll(conversation, conversation.turns.at(-1).answers.map((_, column) => column));
  drawList();
  isAtEnd = true;
  followEnd();
}

function regenerate(column) {
  const turn = page.open.turns.at(-1);
  const { answers } = turn;
  turn.better = null; // of the answer that goes
  answers[column] = newAnswer(page.open.models[column] || answers[column].model);
  answerAll(page.open, [column]);
}

/** Settings for a model: its system prompt, what it saw in training, and half of its context is left to the prompt. */
function fitting(settings, model) {
  const { context = Infinity } = page.served.find((one) => one.id === model) ?? {};
  const most = settings.max_tokens && Math.min(settings.max_tokens, Math.floor(context / 2));
  const [system, isAlone] = [facts.systemOf(settings, model), facts.isAlone(settings, model)];
  return { ...settings, system, isAlone, max_tokens: most };
}

/** The view of an answer; undefined while another conversation is open, or when it was dropped. */
function viewOf(answer, place, column) {
  const view = page.views[place]?.[column];
  return view?.answer === answer ? view : undefined;
}

async function answerAll(conversation, columns) {
  const controller = new AbortController();
  const controllers = page.running.get(conversation.id) ?? new Set();
  page.running.set(conversation.id, controllers.add(controller));
  if (conversation === page.open) drawAll();
  at("spoken").textContent = "The answer begins.";
  keep(conversation);
  speaker.begin();
  const turns = [...conversation.turns];
  const place = turns.length - 1;
  let lastKept = performance.now();
  const working = columns.map((column) => {
    const answer = turns[place].answers[column];
    const changed = () => {
      if (columns.length === 1 && conversation === page.open) speaker.more(textOf(answer));
      later(answer, () => viewOf(answer, place, column)?.update());
      if (performance.now() - lastKept > KEEP_MS) {
        lastKept = performance.now();
        keep(conversation);
      }
    };
    const settings = fitting(conversation.settings, answer.model);
    const { signal } = controller;
    const offered = facts.toolsFor(answer.model, page.tools, conversation.settings);
    return write(answer, turns, { column, settings, tools: offered, maxRounds: page.maxRounds, signal, changed });
  });
  await Promise.all(working);
  controllers.delete(controller);
  if (!controllers.size) page.running.delete(conversation.id);
  if (!page.all.has(conversation.id)) return; // it was deleted
  keep(conversation);
  drawList();
  if (conversation !== page.open) return;
  drawState();
  updateViews(place); // the other answer of a pair has ended, too
  const ended = columns.map((column) => turns[place].answers[column]);
  at("spoken").textContent = "";
  if (ended.length === 1) speaker.end(textOf(ended[0]), why(ended[0]));
  else for (const answer of ended) speaker.say(`${answer.model}: ${textOf(answer)} ${why(answer)}`);
  if (ended.some((answer) => answer.finish === "gone" || answer.finish === "failed")) look();
}

function stop(conversation) {
  for (const controller of page.running.get(conversation.id) ?? []) controller.abort();
}

const waiting = new Set();

/** Do it once before the next frame, however often it is asked for. Hidden tabs have no frames. */
function later(what, draw) {
  if (waiting.has(what)) return;
  waiting.add(what);
  const now = () => (waiting.delete(what), draw());
  if (document.hidden) setTimeout(now, 200);
  else requestAnimationFrame(now);
}

let isAtEnd = true; // whether the reader is at the end of the talk, and so follows it as it grows

function followEnd() {
  if (isAtEnd) at("talk").scrollTop = at("talk").scrollHeight;
}

// ---- the server

let nextLook = 0;

/** Ask the server what it serves; say so when it is gone, and when it is back. */
async function look() {
  clearTimeout(nextLook);
  try {
    const served = await models();
    const isFirst = page.isGone || !page.maxRounds;
    if (isFirst) {
      const [found, told] = await Promise.all([tools(), about()]);
      [page.tools, page.maxRounds] = [found.tools, found.max_rounds];
      facts.learn(told);
    }
    if (page.isGone) at("spoken").textContent = "The server is back.";
    for (const view of page.views.flat()) view?.renderAgain();
    page.isGone = false;
    notice("server", served.length ? "" : "The server has no model with a chat template.");
    const isOther = JSON.stringify(served) !== JSON.stringify(page.served);
    page.served = served;
    if (isOther || isFirst) drawModels();
    if (isFirst && !page.running.has(page.open.id)) drawAll(); // prompts and ratings are known now
  } catch (error) {
    if (error instanceof Refused && error.status === 401) {
      notice("server", key.get() ? "The server refuses the key." : "The server wants a key.");
      if (!at("key").open) at("key").showModal();
      return; // the dialog's end looks again
    }
    page.isGone = true;
    const what = error instanceof Refused ? `cannot answer (${error.message})` : "does not answer";
    notice("server", `The server ${what}. It is asked again every ${LOOK_GONE_MS / 1000} s.`);
  }
  clearTimeout(nextLook);
  nextLook = setTimeout(look, page.isGone ? LOOK_GONE_MS : LOOK_MS);
}

function notice(about, words) {
  page.notices[about] = words;
  const all = Object.values(page.notices).filter(Boolean).join(" ");
  if (at("notice").textContent !== all) at("notice").textContent = all;
  at("notice").hidden = !all;
}

function drawModels() {
  const { models: chosen } = page.open;
  const names = page.served.map((model) => model.id);
  if (names.length) {
    const unknown = page.linked.filter((name) => name && !names.includes(name));
    notice("link", unknown.length ? `The link's ${unknown.join(" and ")} is not served here.` : "");
    if (!names.includes(chosen[0])) chosen[0] = names[0];
    if (!names.includes(chosen[1])) chosen[1] = "";
  }
  at("model-0").replaceChildren(...names.map((name) => new Option(name)));
  at("model-1").replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name)));
  [at("model-0").value, at("model-1").value] = chosen;
  nameModels();
}

/** What names the models: the title, the head, the link, and how a model that never saw a conversation is asked. */
function nameModels() {
  const chosen = page.open.models.filter(Boolean);
  const words = facts.inWords(chosen);
  document.title = [words, "nanodag chat"].filter(Boolean).join(" · ");
  at("about").textContent = chosen.some((model) => facts.factsOf(model).run) ? words : "";
  at("about").title = at("about").textContent;
  if (!page.served.length) return;
  const isFirstAlone = chosen.length === 1 && chosen[0] === page.served[0].id;
  const link = isFirstAlone ? "/" : `/?${new URLSearchParams({ model: chosen[0], beside: chosen[1] ?? "" })}`;
  history.replaceState(null, "", link);
  at("link").hidden = !navigator.clipboard;
  const alone = chosen.filter((model) => facts.isAlone(page.open.settings, model));
  at("alone").hidden = !alone.length;
  if (!alone.length) return;
  const verb = alone.length > 1 ? "were" : "was";
  at("alone").replaceChildren(
    el("bdi", {}, alone.join(" and ")),
    ` ${verb} trained on single questions: each message is sent alone. `,
    button("Send the whole conversation", sendHistory, { class: "plain quiet" }),
  );
}

function sendHistory() {
  page.open.settings.history = true;
  keep(page.open);
  nameModels();
  at("question").focus();
}

/** The models that the page's address names; empty for none. */
function linked() {
  const query = new URLSearchParams(location.search);
  return query.has("model") ? [query.get("model"), query.get("beside") ?? ""] : [];
}

/** The conversation to begin with: the newest, but where a link names other models. */
function firstOpen() {
  const newest = inOrder(page.all)[0];
  if (!page.linked.length || String(newest?.models) === String(page.linked)) return newest ?? newConversation();
  return { ...newConversation(), models: [...page.linked] };
}

// ---- what the reader does

function submit(event) {
  event?.preventDefault();
  const question = at("question").value;
  if (!question.trim() || page.running.has(page.open.id)) return;
  at("question").value = "";
  fit();
  ask(question);
}

/** Make the message field as high as its text. */
function fit() {
  const field = at("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function editLast() {
  const last = [...at("talk").querySelectorAll(".question .edit")].at(-1);
  last?.click();
}

function openShelf() {
  document.body.classList.add("shelf-open");
  at("shade").hidden = false;
  at("open-shelf").ariaExpanded = "true";
  at("close-shelf").focus();
}

function closeShelf() {
  if (!document.body.classList.contains("shelf-open")) return;
  document.body.classList.remove("shelf-open");
  at("shade").hidden = true;
  at("open-shelf").ariaExpanded = "false";
  at("open-shelf").focus();
}

function openSettings() {
  const form = at("settings").querySelector("form");
  const { settings, models: chosen } = page.open;
  for (const field of form.elements) {
    if (field.type === "checkbox") field.checked = Boolean(settings[field.name]);
    else if (field.name) field.value = settings[field.name] ?? "";
  }
  for (const [column, name] of SYSTEMS.entries()) {
    form.elements[name].value = facts.systemOf(settings, chosen[column]) ?? "";
  }
  at("system-of").textContent = `System prompt of ${chosen[0] || "the model"}`;
  at("other-system-of").textContent = `System prompt of ${chosen[1]}`;
  at("other-system").hidden = !chosen[1] || chosen[1] === chosen[0];
  const never = chosen.filter(facts.neverCalled);
  at("unseen-tools").hidden = !never.length;
  const names = el("bdi", {}, never.join(" and "));
  at("unseen-tools").querySelector("span").replaceChildren("Offer them also to ", names, ", which never saw a call");
  at("rated-to").textContent = facts.ratings() ? `Ratings are kept in ${facts.ratings()}.*.jsonl` : "";
  const boxes = page.tools.map((one) => {
    const { name, description } = one.definition.function;
    const box = el("input", { type: "checkbox", value: name, disabled: one.why_not !== "" });
    box.checked = facts.isChosen(one, settings);
    const words = el("span", {}, name, el("span", { class: "note" }, one.why_not || description));
    return el("label", { class: "check" }, box, words);
  });
  at("tools").replaceChildren(...boxes);
  at("settings").showModal();
}

function takeSettings() {
  const form = at("settings").querySelector("form");
  const { settings } = page.open;
  for (const field of form.elements) {
    if (!field.name || !field.validity.valid || SYSTEMS.includes(field.name)) continue;
    if (field.type === "checkbox") settings[field.name] = field.checked;
    else if (field.type === "number") settings[field.name] = field.value === "" ? null : Number(field.value);
    else settings[field.name] = field.value;
  }
  for (const [column, name] of SYSTEMS.entries()) {
    const model = page.open.models[column];
    if (column && at("other-system").hidden) continue;
    if (form.elements[name].value !== facts.systemOf(settings, model)) facts.setSystem(settings, model, form.elements[name].value);
  }
  const boxes = [...at("tools").querySelectorAll("input:not(:disabled)")];
  settings.tools = boxes.filter((box) => box.checked).map((box) => box.value);
  kept.settings.set(settings);
  keep(page.open);
  nameModels();
}

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  at("theme").textContent = THEMES[name];
  at("theme").ariaLabel = `Colours: ${THEMES[name]}`;
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  kept.theme.set(next);
  applyTheme(next);
}

function listen() {
  at("composer").addEventListener("submit", submit);
  at("question").addEventListener("input", fit);
  at("question").addEventListener("keydown", (event) => {
    if (isSendKey(event)) submit(event);
    else if (event.key === "ArrowUp" && !at("question").value) (event.preventDefault(), editLast());
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    hideHint();
    closeShelf();
    stop(page.open);
  });
  at("stop").addEventListener("click", () => (stop(page.open), at("question").focus()));
  at("begin").addEventListener("click", () => (closeShelf(), show(newConversation()), at("question").focus()));
  at("open-shelf").addEventListener("click", openShelf);
  for (const id of ["close-shelf", "shade"]) at(id).addEventListener("click", closeShelf);
  at("open-settings").addEventListener("click", openSettings);
  at("settings").addEventListener("close", takeSettings);
  at("key").addEventListener("close", () => {
    const field = at("key").querySelector("input");
    if (!field.value.trim()) return; // the next question asks for it again
    key.set(field.value.trim());
    field.value = "";
    look();
  });
  at("theme").addEventListener("click", nextTheme);
  at("search").addEventListener("input", drawList);
  at("export").addEventListener("click", () => exportShown(page.all));
  at("link").addEventListener("click", () => copyText(location.href, at("link")));
  at("talk").addEventListener("scroll", () => {
    const talk = at("talk");
    isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_END;
  });
  new MutationObserver(followEnd).observe(at("talk"), { childList: true, subtree: true, characterData: true });
  for (const column of [0, 1]) {
    at(`model-${column}`).addEventListener("change", (event) => {
      page.open.models[column] = event.target.value;
      keep(page.open);
      page.linked = [];
      notice("link", "");
      nameModels();
      if (!page.open.turns.length) drawAll();
    });
  }
  window.addEventListener("pagehide", () => {
    for (const id of page.running.keys()) keep(page.all.get(id));
    page.isLeft = true;
  });
  window.addEventListener("pageshow", () => (page.isLeft = false));
  document.addEventListener("visibilitychange", () => document.hidden || look());
  kept.watch(takeOther);
}

applyTheme(kept.theme.get());
kept.conversations().forEach(take);
page.linked = linked();
show(firstOpen());
listen();
look();
if (!matchMedia("(pointer: coarse)").matches) at("question").focus(); // a phone would open its keyboard
