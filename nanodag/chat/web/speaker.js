// What a screen reader says of an answer while it grows: whole sentences, a few seconds apart.

const EVERY_MS = 1500;
const MOST_LINES = 40;
const END = /[.!?…:]["')\]]*\s|\n/g;

export class Speaker {
  constructor(region) {
    this.region = region; // role=log
    this.begin();
  }

  begin() {
    this.said = 0; // letters
    this.last = performance.now();
  }

  /** Say the sentences of a text that are new and whole. */
  more(text) {
    if (performance.now() - this.last < EVERY_MS) return;
    let end = this.said;
    for (const found of text.slice(this.said).matchAll(END)) end = this.said + found.index + found[0].length;
    if (end > this.said) this.say(text.slice(this.said, end));
    this.said = end;
  }

  /** Say the rest of a text, and how it ended. */
  end(text, why) {
    this.say(`${text.slice(this.said).trim()} ${why}`);
    this.begin();
  }

  say(words) {
    this.last = performance.now();
    const line = document.createElement("p");
    line.textContent = words.trim();
    this.region.append(line);
    while (this.region.childElementCount > MOST_LINES) this.region.firstElementChild.remove();
  }
}
