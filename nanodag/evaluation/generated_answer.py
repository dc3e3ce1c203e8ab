"""A written answer: its text, how it ended, and the thinking that is left out of it. No torch here."""

from typing import Any, Literal

from nanodag.config.kinds.evaluation import ThinkingConfig

Ending = Literal["stop", "length", "too_long"]


class Answer(str):
    """The text that is scored. It is a `str`, so that lm-eval passes it on with what is known of it.

    ending: `stop` (by itself or at a stop string), `length` (it reached its limit: truncated) or `too_long` (the prompt
    left it no room, so it is empty and was not asked for). thinking: what was left out.
    """

    ending: Ending
    thinking: str

    def __new__(cls, text: Any = "", *, ending: Ending = "stop", thinking: str = "") -> "Answer":
        made = super().__new__(cls, text)
        made.ending, made.thinking = ending, thinking
        return made


def answer_of(text: str, *, ending: Ending, tags: ThinkingConfig | None, is_open: bool = False) -> Answer:
    """What was written as an answer, without its thinking where tags are given.

    The answer is what stands behind the last end tag, blanks in front left out. Text that begins to think and does not
    end it is all thinking, and the answer empty. is_open: the prompt itself ends with the begin tag.
    """
    if tags is None:
        return Answer(text, ending=ending)
    thinking, end, answer = text.rpartition(tags.end)
    if not end and (is_open or tags.begin in text):
        thinking, answer = text, ""
    elif not end:
        return Answer(text, ending=ending)
    _, begin, inner = thinking.partition(tags.begin)
    return Answer(answer.lstrip(), ending=ending, thinking=inner if begin else thinking)
