// How turns and answers look. What a model or a reader wrote enters the page as text, or as HTML that the server made.

import { partsOf, textOf, why } from "/chat/answer.js";
import { html } from "/chat/server.js";

const RENDER_EVERY_MS = 400;
const TOO_LONG = 413;
const copies = navigator.clipboard !== undefined; // only where the page came over HTTPS or from this machine

/** An element. properties: attributes; those that begin with `on` are listeners. children: elements or texts. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function button(words, onclick, properties = {}) {
  return el("button", { type: "button", class: "plain", onclick, ...properties }, words);
}

/** One exchange. actions: edit(text), regenerate(column) where it is the last, ratings(column): see AnswerView. Returns
 * its element, and the views of its answers. */
export function drawTurn(turn, actions) {
  const question = el("div", { class: "question" });
  showQuestion(question, turn, actions);
  const views = turn.answers.map((answer, column) => {
    const regenerate = actions.regenerate && (() => actions.regenerate(column));
    return new AnswerView(answer, regenerate, () => actions.ratings(column));
  });
  const answers = el("div", { class: views.length > 1 ? "answers two" : "answers" }, ...views.map((view) => view.root));
  return { root: el("div", { class: "turn" }, question, answers), views };
}

function showQuestion(place, turn, actions) {
  const edit = button("Edit", () => editQuestion(place, turn, actions), { class: "plain quiet edit" });
  place.replaceChildren(el("h2", { class: "unseen" }, "You"), el("p", { class: "asked" }, turn.question), edit);
}

function editQuestion(place, turn, actions) {
  const field = el("textarea", { rows: "3", "aria-label": "Your message, to be changed" });
  field.value = turn.question;
  const cancel = () => {
    showQuestion(place, turn, actions);
    place.querySelector(".edit")?.focus();
  };
  const send = () => (field.value.trim() ? actions.edit(field.value) : cancel());
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (isSendKey(event)) send();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  place.replaceChildren(
    field,
    el("p", { class: "note" }, "What comes after this message is asked again."),
    el("p", { class: "end" }, button("Cancel", cancel), button("Send", send, { class: "" })),
  );
  field.focus();
}

/** Whether a key sends: Enter alone, where there is a keyboard, and not while a word is being put together. */
export function isSendKey(event) {
  const isTouch = matchMedia("(pointer: coarse)").matches;
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch;
}

/** One answer, which `update` draws as it grows. ratings(): what may be said of it now, each {words, name, isPressed,
 * press}; press() returns words of what came of it. */
export class AnswerView {
  constructor(answer, regenerate, ratings) {
    this.answer = answer;
    this.ratings = ratings;
    this.rating = el("span", { class: "rating", role: "group", "aria-label": "Your rating" });
    this.rated = el("span", { class: "why", role: "status" });
    this.steps = [];
    this.body = el("div", { class: "steps" });
    this.why = el("span", { class: "why" });
    this.tokens = button("Probabilities", () => this.toggleTokens(), { class: "plain quiet", "aria-pressed": "false" });
    this.copy = button("Copy", () => copyText(textOf(answer), this.copy), { class: "plain quiet" });
    this.again = button("Regenerate", regenerate, { class: "plain quiet" });
    const buttons = [this.tokens, copies && this.copy, regenerate && this.again].filter(Boolean);
    const foot = el("p", { class: "foot" }, this.why, ...buttons, this.rating, this.rated);
    const head = el("h3", {}, answer.model);
    this.root = el("article", { class: "answer", "aria-label": `Answer of ${answer.model}` }, head, this.body, foot);
    this.update();
  }

  update() {
    const { answer } = this;
    answer.steps.forEach((step, place) => {
      if (!this.steps[place]) {
        this.steps[place] = new StepView(step);
        this.body.append(this.steps[place].root);
      }
      this.steps[place].update(this.tokens.ariaPressed === "true");
    });
    const hasEnded = answer.finish !== "";
    this.root.ariaBusy = String(!hasEnded);
    this.root.classList.toggle("writing", !hasEnded);
    this.root.classList.toggle("bad", ["failed", "gone"].includes(answer.finish));
    const alone = answer.isAlone ? "It was asked alone, without the messages before it." : "";
    this.why.textContent = [why(answer), leftOut(answer), alone, amount(answer)].filter(Boolean).join(" ");
    this.tokens.hidden = !answer.steps.some((step) => step.tokens.length);
    this.copy.hidden = this.again.hidden = !hasEnded;
    this.drawRatings();
  }

  drawRatings() {
    const ratings = this.answer.finish === "" ? [] : this.ratings();
    this.rating.hidden = !ratings.length;
    const drawn = [...this.rating.children].map((one) => `${one.textContent} ${one.ariaPressed}`).join();
    if (drawn === ratings.map((one) => `${one.words} ${one.isPressed}`).join()) return; // a press keeps its focus
    const place = [...this.rating.children].indexOf(document.activeElement);
    const drawButton = ({ words, name, isPressed, press }) => {
      const pressed = async () => {
        if (this.isBusy) return;
        this.isBusy = true;
        this.rated.textContent = await press();
        this.isBusy = false;
      };
      const names = { "aria-label": name, title: name, "aria-pressed": String(isPressed) };
      return button(words, pressed, { class: "plain quiet", ...names });
    };
    this.rating.replaceChildren(...ratings.map(drawButton));
    this.rating.children[place]?.focus();
  }

  /** What could not be rendered while the server was gone is rendered now. */
  renderAgain() {
    for (const step of this.steps) step.markdown.renderAgain();
  }

  toggleTokens() {
    this.tokens.ariaPressed = String(this.tokens.ariaPressed !== "true");
    hideHint();
    this.update();
  }
}

function leftOut({ leftOut: number }) {
  if (!number) return "";
  return `The context was full: the oldest ${number === 1 ? "exchange was" : `${number} exchanges were`} left out.`;
}

function amount({ usage, finish, seconds }) {
  return finish && usage ? `${usage.completion} tokens in ${seconds.toFixed(1)} s.` : "";
}

/** One request's part of an answer: what the model thought, said and called. */
class StepView {
  constructor(step) {
    this.step = step;
    this.thought = el("p", { class: "raw" });
    this.thinking = el("details", { class: "thought" }, el("summary", {}, "Thoughts"), this.thought);
    this.markdown = new Markdown();
    this.tokens = el("div", { class: "tokens", role: "group" });
    this.tokens.ariaLabel = "Tokens with their probabilities: arrow keys lead from one to the next";
    this.tokens.addEventListener("keydown", moveAmongTokens);
    this.calls = [];
    this.callList = el("div", { class: "calls" });
    this.root = el("div", { class: "step" }, this.thinking, this.markdown.root, this.tokens, this.callList);
  }

  update(showsTokens) {
    const { step } = this;
    const { thought, said } = partsOf(step);
    const asTokens = showsTokens && step.tokens.length > 0;
    this.thinking.hidden = asTokens || !thought;
    if (this.thought.textContent !== thought) this.thought.textContent = thought;
    this.markdown.root.hidden = asTokens || !said;
    this.tokens.hidden = !asTokens;
    if (asTokens) {
      for (const token of step.tokens.slice(this.tokens.childElementCount)) this.tokens.append(tokenSpan(token));
      this.tokens.firstElementChild.tabIndex = 0;
    } else {
      this.markdown.show(said);
    }
    step.calls.forEach((call, place) => {
      if (!this.calls[place]) {
        this.calls[place] = new CallView(call);
        this.callList.append(this.calls[place].root);
      }
      this.calls[place].update();
    });
  }
}

/** One call of a tool: what was asked is shown, its result is folded. */
class CallView {
  constructor(call) {
    this.call = call;
    this.name = el("span", { class: "call-name" });
    this.asked = el("code", {});
    this.brief = el("span", { class: "brief" });
    this.result = el("pre", { tabindex: "0", "aria-label": "Result" });
    this.folded = el("details", {}, el("summary", {}, "Result ", this.brief), this.result);
    this.root = el("div", { class: "call" }, this.name, el("pre", { tabindex: "0" }, this.asked), this.folded);
  }

  update() {
    const { call } = this;
    this.name.textContent = call.name;
    this.asked.textContent = onlyText(call.arguments);
    const isThere = call.result !== null;
    this.folded.hidden = !isThere;
    this.root.classList.toggle("failed", call.failed);
    if (!isThere || this.result.textContent === call.result) return;
    this.result.textContent = call.result || "(nothing was printed)";
    const lines = call.result.split("\n");
    this.brief.textContent = lines.length > 1 ? `${lines[0].slice(0, 60)} …` : lines[0].slice(0, 80);
  }
}

/** The text of arguments with one text, as both tools have it; else the arguments as they came. */
function onlyText(args) {
  try {
    const values = Object.values(JSON.parse(args));
    return values.length === 1 && typeof values[0] === "string" ? values[0] : args;
  } catch {
    return args;
  }
}

const rendered = new Map(); // text to HTML
const MAX_RENDERED = 500;

async function renderedHtml(text) {
  if (!rendered.has(text)) {
    const made = await html(text);
    if (rendered.size >= MAX_RENDERED) rendered.delete(rendered.keys().next().value);
    rendered.set(text, made);
  }
  return rendered.get(text);
}

/** Text as Markdown, rendered again while it grows, a few times a second; as it is where it cannot be rendered. */
class Markdown {
  constructor() {
    this.root = el("div", { class: "text raw" });
    this.wanted = this.shown = "";
    this.isBusy = false;
    this.isPlain = false; // though it could be rendered, were the server there
  }

  show(text) {
    this.wanted = text;
    this.catchUp();
  }

  renderAgain() {
    if (!this.isPlain) return;
    this.shown = null;
    this.catchUp();
  }

  async catchUp() {
    if (this.isBusy) return;
    this.isBusy = true;
    while (this.shown !== this.wanted) {
      const text = this.wanted;
      try {
        if (!this.shown) this.showPlain(text);
        this.root.innerHTML = await renderedHtml(text);
        this.root.classList.remove("raw");
        this.isPlain = false;
        for (const block of this.root.querySelectorAll("pre")) dressCode(block);
      } catch (error) {
        this.showPlain(text);
        this.isPlain = error.status !== TOO_LONG;
      }
      this.shown = text;
      await new Promise((resolve) => setTimeout(resolve, this.wanted === text ? 0 : RENDER_EVERY_MS));
    }
    this.isBusy = false;
  }

  showPlain(text) {
    this.root.textContent = text;
    this.root.classList.add("raw");
  }
}

function dressCode(block) {
  block.tabIndex = 0; // so that keys can scroll it
  const language = /language-(\S+)/.exec(block.firstElementChild?.className ?? "")?.[1] ?? "";
  const copy = button("Copy", () => copyText(block.innerText, copy), { class: "plain quiet" });
  const head = el("div", { class: "code-head" }, el("span", {}, language), ...(copies ? [copy] : []));
  const frame = el("div", { class: "code" });
  block.replaceWith(frame);
  frame.append(head, block);
}

export async function copyText(text, pressed) {
  const words = pressed.textContent;
  const isDone = await navigator.clipboard.writeText(text).then(() => true, () => false);
  pressed.textContent = isDone ? "Copied" : "Not copied";
  setTimeout(() => (pressed.textContent = words), 1500);
}

const tokenOf = new WeakMap(); // span to [text, logprob, alternatives]

function tokenSpan(token) {
  const [text, logprob] = token;
  const span = el("span", { class: "token", tabindex: "-1" }, text.replaceAll("\n", "⏎\n") || "∅");
  span.style.setProperty("--doubt", String(1 - Math.exp(logprob)));
  tokenOf.set(span, token);
  return span;
}

function moveAmongTokens(event) {
  const now = event.target.closest(".token");
  const { firstElementChild: first, lastElementChild: last } = event.currentTarget;
  const steps = {
    ArrowRight: now?.nextElementSibling, ArrowLeft: now?.previousElementSibling, Home: first, End: last,
  };
  const next = steps[event.key];
  if (!now || !next) return;
  event.preventDefault();
  now.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

const hint = document.getElementById("hint");

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  return value < 0.01 ? "< 0.01 %" : `${value.toFixed(value < 1 ? 2 : 1)} %`;
}

function showHint(span) {
  const [text, logprob, others] = tokenOf.get(span);
  const rows = others.map(([other, its]) => {
    const chance = el("meter", { min: "0", max: "1", value: String(Math.exp(its)), "aria-hidden": "true" });
    return el("li", other === text ? { class: "chosen" } : {}, el("code", {}, seen(other)), chance, percent(its));
  });
  hint.replaceChildren(el("p", {}, el("code", {}, seen(text)), ` ${percent(logprob)}`));
  if (rows.length) hint.append(el("ol", { "aria-label": "The likeliest tokens here" }, ...rows));
  hint.hidden = false;
  span.setAttribute("aria-describedby", "hint");
  const { left, top, bottom } = span.getBoundingClientRect();
  const isBelow = bottom + hint.offsetHeight + 12 < innerHeight;
  hint.style.left = `${Math.max(8, Math.min(left, innerWidth - hint.offsetWidth - 8))}px`;
  hint.style.top = `${Math.max(8, isBelow ? bottom + 6 : top - hint.offsetHeight - 6)}px`;
}

/** A token with its spaces and line ends to be seen. */
function seen(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

export function hideHint() {
  hint.hidden = true;
  document.querySelector("[aria-describedby=hint]")?.removeAttribute("aria-describedby");
}

for (const [shows, hides] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  document.addEventListener(shows, (event) => {
    const span = event.target.closest?.(".token");
    if (span) showHint(span);
  });
  document.addEventListener(hides, hideHint);
}
document.addEventListener("scroll", hideHint, true);
