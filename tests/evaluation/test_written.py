import pytest

from nanodag.config.kinds.evaluation import ThinkingConfig
from nanodag.evaluation.generated_answer import Answer, answer_of

TAGS = ThinkingConfig()


@pytest.mark.parametrize(
    ("text", "is_open", "answer", "thinking"),
    [
        ("<think>a</think>\n\nb", False, "b", "a"),
        ("a</think>b", False, "b", "a"),  # the prompt began to think
        ("a</think>b", True, "b", "a"),
        ("<think></think>b", False, "b", ""),
        ("<think>a", False, "", "a"),  # it did not end
        ("a", True, "", "a"),
        ("x<think>a</think>y<think>b</think>z", False, "z", "a</think>y<think>b"),
        ("a", False, "a", ""),
        ("", False, "", ""),
    ],
)
def test_the_answer_is_what_stands_behind_thinking(text, is_open, answer, thinking):
    found = answer_of(text, ending="length", tags=TAGS, is_open=is_open)
    assert (found, found.thinking, found.ending) == (answer, thinking, "length")


def test_without_tags_a_text_is_its_own_answer():
    found = answer_of("<think>a</think>b", ending="stop", tags=None, is_open=True)
    assert (found, found.thinking, isinstance(found, Answer)) == ("<think>a</think>b", "", True)
