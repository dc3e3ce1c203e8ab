// What facts.py says of each model: {run, stage, prompts, has_turns, has_calls}, and what follows for how it is asked.

let about = { models: {}, ratings: "" };

/** Take what the server says: {models, ratings}. */
export function learn(told) {
  about = told;
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
export const isAlone = (settings, model) => factsOf(model).has_turns === false && !settings.history;

/** A model's own system prompt in these settings. */
export const systemOf = (settings, model) => settings.systems?.[fullName(model)] ?? settings.system;

export function setSystem(settings, model, text) {
  settings.systems = { ...settings.systems, [fullName(model)]: text };
}

export const neverCalled = (model) => factsOf(model).has_calls === false;

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
