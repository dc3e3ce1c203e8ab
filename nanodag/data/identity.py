"""Conversations in which a model learns who it is, out of a small file of yours: `identity:me.yaml?size=1000&seed=0`.

    name: Ada
    made_by: the people of Lovelace Lane
    about: ["I am a small language model, trained from raw text.", "My code is open."]
    facts:
      - ask: ["Are you free?", "What do you cost?"]
        say: ["I cost nothing: I run on your own machine."]

`{name}` and `{made_by}` may stand in any text. Each conversation takes one to three subjects in a drawn order, a
greeting before them or none, and words each question and answer anew. Row i depends on the file, the seed and i alone.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nanodag.data.sources import LazyRows, Row
from nanodag.errors import SourceError

MOST_SUBJECTS = 3
_GREETINGS = (
    ("Hi!", "Hello! I am {name}. What can I do for you?"),
    ("hello", "Hi there. What would you like to talk about?"),
    ("Good morning", "Good morning! How can I help?"),
    ("Hey, anybody there?", "Yes, {name} is here. Ask away."),
)
_NAME = (
    ("What is your name?", "Who are you?", "what should I call you", "Do you have a name?", "Who am I talking to?"),
    ("My name is {name}.", "I am {name}.", "Call me {name}.", "You are talking to {name}, a language model."),
)
_MAKER = (
    ("Who made you?", "who built you", "Where do you come from?", "Which company are you from?", "Who trained you?"),
    ("I was made by {made_by}.", "I come from {made_by}.", "The work is that of {made_by}."),
)
_OTHERS = (
    (
        "Are you ChatGPT?",
        "You are Claude, right?",
        "Is this Gemini?",
        "Are you a person?",
        "Am I chatting with a human?",
    ),
    ("No, I am {name}, a language model made by {made_by}.", "I am not. My name is {name}, and {made_by} made me."),
)
_ABOUT = (
    "Tell me about yourself.",
    "What kind of thing are you?",
    "Describe yourself",
    "What should I know about you?",
)


class Fact(BaseModel):
    """A subject: one of `ask` is asked, one of `say` is the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    ask: tuple[str, ...] = Field(min_length=1)
    say: tuple[str, ...] = Field(min_length=1)


class Persona(BaseModel):
    """Content of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(min_length=1)
    made_by: str = Field(min_length=1)
    about: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()


def read_persona(path: Path) -> Persona:
    """Raises SourceError for a file that is no persona, naming what is wrong in it."""
    try:
        return Persona.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise SourceError(
            f"{path} describes no identity: {error}. It has name, made_by, and maybe about and facts (ask, say)."
        ) from error


class Conversations(LazyRows):
    """`size` conversations with that persona, as rows with a column `messages`."""

    def __init__(self, persona: Persona, *, size: int, seed: int) -> None:
        super().__init__(size, self._row)
        self._persona, self._seed = persona, seed
        own = [(fact.ask, fact.say) for fact in persona.facts]
        about = [(_ABOUT, (" ".join(persona.about),))] if persona.about else []
        self._subjects: list[tuple[Sequence[str], Sequence[str]]] = [_NAME, _MAKER, _OTHERS, *about, *own]

    def _row(self, index: int) -> Row:
        stream = random.Random(f"identity:{self._seed}:{index}")
        messages = [
            {"role": role, "content": self._named(text)}
            for turn in self._turns(stream)
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return {"messages": messages}

    def _turns(self, stream: random.Random) -> Iterator[tuple[str, str]]:
        if stream.random() < 0.3:
            yield stream.choice(_GREETINGS)
        for questions, answers in stream.sample(self._subjects, stream.randint(1, MOST_SUBJECTS)):
            yield stream.choice(questions), stream.choice(answers)

    def _named(self, text: str) -> str:
        return text.replace("{name}", self._persona.name).replace("{made_by}", self._persona.made_by)
