// The shelf: all conversations, those that a search finds, and their export.

import { textOf } from "/chat/answer.js";
import { button, el } from "/chat/view.js";

const at = (id) => document.getElementById(id);
const byTime = (a, b) => b.updated - a.updated;

/** The newest first. */
export const inOrder = (all) => [...all.values()].sort(byTime);

function wordsOf(conversation) {
  const said = conversation.turns.flatMap((turn) => [turn.question, ...turn.answers.map(textOf)]);
  return [conversation.title, ...said].join("\n").toLowerCase();
}

/** Conversations in which every word of the search stands. */
function foundIn(all) {
  const words = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const ordered = inOrder(all);
  return words.length ? ordered.filter((one) => words.every((word) => wordsOf(one).includes(word))) : ordered;
}

/** Draw the list. actions: show(conversation), forget(conversation). */
export function drawShelf(all, current, actions) {
  const found = foundIn(all);
  const items = found.map((one) => {
    const open = button(one.title, () => actions.show(one), { class: "plain title" });
    if (one === current) open.setAttribute("aria-current", "true");
    const erase = button("✕", () => actions.forget(one), { class: "plain quiet", "aria-label": `Delete ${one.title}` });
    return el("li", {}, open, erase);
  });
  at("conversations").replaceChildren(...items);
  const isSearch = at("search").value.trim() !== "";
  at("search").hidden = at("export").hidden = !all.size;
  at("found").textContent = isSearch ? `${found.length} of ${all.size} found` : "";
  at("export").textContent = isSearch ? "Export what was found" : "Export all";
  at("export").disabled = !found.length;
}

/** Save the conversations that the list shows as a JSON file. */
export function exportShown(all) {
  const conversations = foundIn(all);
  const content = { format: "nanodag.chat", version: 1, exported: new Date().toISOString(), conversations };
  const url = URL.createObjectURL(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }));
  el("a", { href: url, download: `nanodag-chat-${content.exported.slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
