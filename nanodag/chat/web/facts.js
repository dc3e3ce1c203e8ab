// What is known of each model: {run, stage, prompts, hasTurns, hasCalls}, and what follows for how it is asked.
// hasTurns, hasCalls: false where nothing that it was trained on can have had several turns, or calls of tools; missing
// where nobody knows.

const MAX_PROMPTS = 8;
const ONE_TURN = "one_turn";
const NO_CHATS = ["tokenizer", "pretrain"]; // kinds whose data are no conversations
// Adapters whose rows may have several turns, or parts that are calls; a user's own (`module:function`) may, too.
const WITH_TURNS = ["messages", "smoltalk", "sharegpt", "preference"];
const WITH_CALLS = ["messages"];

let about = { models: {}, ratings: "" };

/** Take what the server says: {models, ratings}; of each model what facts.py tells. */
export function learn({ models, ratings }) {
  const known = Object.entries(models).map(([name, model]) => [name, { ...model, ...drawn(model) }]);
  about = { models: Object.fromEntries(known), ratings };
}

/** What follows from the stages of a model's run. */
function drawn({ stage, stages }) {
  const lineage = lineageOf(stage, stages);
  const evaluations = Object.values(stages).filter(({ kind, chat }) => kind === "eval" && chat !== false);
  evaluations.sort((a, b) => b.inputs.includes(stage) - a.inputs.includes(stage)); // its own come first
  const chats = lineage.filter(({ kind }) => !NO_CHATS.includes(kind));
  const asked = [...evaluations, ...chats].flatMap((one) => one.sample_prompts ?? []);
  const prompts = [...new Set(asked)].slice(0, MAX_PROMPTS);
  if (!lineage.some(({ kind }) => kind === "pretrain")) return { prompts }; // its first weights are of elsewhere
  const sources = chats.flatMap(({ data }) => data);
  const isOpen = sources.some(({ adapter }) => adapter.includes(":")) || chats.some((one) => one.generate !== ONE_TURN);
  const hasTurns = isOpen || sources.some(({ adapter }) => WITH_TURNS.includes(adapter));
  const hasCalls = isOpen || sources.some(({ adapter, tools }) => tools || WITH_CALLS.includes(adapter));
  return { prompts, hasTurns, hasCalls };
}

/** A stage and all that it is made from. */
function lineageOf(stage, stages, known = new Set()) {
  if (!(stage in stages) || known.has(stage)) return [];
  known.add(stage);
  return [stages[stage], ...stages[stage].inputs.flatMap((input) => lineageOf(input, stages, known))];
}

/** Where ratings are kept; empty where they are not. */
export const ratings = () => about.ratings;

export const factsOf = (model) => about.models[model] ?? {};

/** A model's name where several runs are spoken of. */
export function fullName(model) {
  const { run, stage } = factsOf(model);
  return run ? `${run}:${stage || "newest"}` : model;
}

/** Models and their runs, in words: `rl beside sft of RUN`. */
export function inWords(models) {
  const runs = [...new Set(models.map((model) => factsOf(model).run).filter(Boolean))];
  const isOne = runs.length === 1 && models.every((model) => factsOf(model).run);
  const names = models.map((model) => (isOne ? factsOf(model).stage || "newest weights" : fullName(model)));
  return names.filter(Boolean).join(" beside ") + (isOne ? ` of ${runs[0]}` : "");
}

/** The pipeline's prompts for these models, each once. */
export const promptsFor = (models) => [...new Set(models.flatMap((model) => factsOf(model).prompts ?? []))];

/** Whether a model is sent each message without those before it. */
export const isAlone = (settings, model) => factsOf(model).hasTurns === false && !settings.history;

/** A model's own system prompt in these settings. */
export const systemOf = (settings, model) => settings.systems?.[fullName(model)] ?? settings.system;

export function setSystem(settings, model, text) {
  settings.systems = { ...settings.systems, [fullName(model)]: text };
}

export const neverCalled = (model) => factsOf(model).hasCalls === false;

/** Whether the settings want a tool, whatever the model. */
export function isChosen(tool, settings) {
  if (tool.why_not) return false;
  return settings.tools?.includes(tool.definition.function.name) ?? tool.is_default;
}

/** Definitions of the tools that a model is offered. */
export function toolsFor(model, tools, settings) {
  if (neverCalled(model) && !settings.unseenTools) return [];
  return tools.filter((tool) => isChosen(tool, settings)).map((tool) => tool.definition);
}
