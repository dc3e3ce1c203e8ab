"""Following instructions that a program can check: IFEval's rules, one function an instruction.

A rule is `fn(text, **arguments) -> bool`, arguments as in the dataset.

Source of what each means: IFEval, arXiv:2311.07911, table 1, and the dataset's own wording. text has at least one
character that is no blank. A reward is optimised, so some ask more than lm-eval's, which only measure: a keyword is a
whole word; a placeholder, a section and a postscript say something, and P.P.S. is no P.S.; exactly one of the allowed
answers is given; JSON is an object or a list; something follows the repeated request.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward

# Exactly one of these is to be given.
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?:\s+|$)")


def _compare(found: int, relation: str, number: int) -> bool:
    match relation:
        case "at least":
            return found >= number
        case "less than":
            return found < number
    raise ValueError(f"the relation {relation!r} is neither 'at least' nor 'less than'")


def _times(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    sentences = [part for part in _SENTENCE_END.split(text) if any(map(str.isalnum, part))]
    return _compare(len(sentences), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Divided by ***; none of them empty, save before the first and after the last divider."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1] if len(parts) > 1 else []
    return all(inner) and sum(map(bool, parts)) == num_paragraphs


def first_word_of_paragraph(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Divided by an empty line; counted from 1."""
    paragraphs = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = re.match(r"[\"']*([^\s.,?!\"']*)", paragraphs[nth_paragraph - 1])
    return word is not None and word.group(1).lower() == first_word.lower()


def postscript(text: str, *, postscript_marker: str) -> bool:
    """A line that begins with the marker (P.S., P.P.S), blanks between its letters or not, and says something."""
    marker = r"\s?".join(re.escape(letter) + r"\.?" for letter in postscript_marker if letter.isalpha())
    return re.search(rf"^[^\S\n]*{marker}[\s:]*\w", text, re.IGNORECASE | re.MULTILINE) is not None


def highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """*so* or **so**, with something between the marks; bullets are none."""
    double = re.findall(r"\*\*([^\n*]+)\*\*", text)
    single = re.findall(r"\*([^\n*]+)\*", re.sub(r"\*\*[^\n*]*\*\*", "", text))
    return sum(bool(part.strip()) for part in double + single) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many headings `Section 1`, each followed by text."""
    parts = re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)
    return sum(bool(part.strip(" \t\n:.-")) for part in parts[1:]) >= num_sections


def json_format(text: str) -> bool:
    """All of it is one JSON object or list, in a fenced block or not."""
    bare = re.sub(r"^```(?:json|JSON|Json)?\s*\n?|\n?```$", "", text.strip())
    try:
        return isinstance(json.loads(bare), dict | list)
    except (ValueError, RecursionError):
        return False


def two_responses(text: str) -> bool:
    """Two that differ, divided by ******."""
    parts = [part.strip() for part in text.split("******")]
    inner = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Begins with the request, word for word, and something follows."""
    request, answer = prompt_to_repeat.strip().lower(), text.strip().lower()
    return answer.startswith(request) and len(answer) > len(request)


RULES: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, *, keywords: all(_times(text, word) for word in keywords),
    "keywords:frequency": lambda text, *, keyword, frequency, relation: _compare(
        _times(text, keyword), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, *, forbidden_words: (
        not any(_times(text, word) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, *, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": lambda text, *, num_words, relation: _compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": first_word_of_paragraph,
    "detectable_content:number_placeholders": lambda text, *, num_placeholders: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": lambda text, *, num_bullets: (  # lines that begin with `* ` or `-`
        len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-)[ \t]*[^\s*-]", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: sum(text.count(answer) for answer in _CONSTRAINED) == 1,
    "detectable_format:number_highlighted_sections": highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": lambda text: any(part.strip("<> \t") for part in re.findall(r"<<([^\n]+?)>>", text)),
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": lambda text, *, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: re.fullmatch(r'\s*".+"\s*', text, re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda text, *, capital_frequency, capital_relation: _compare(
        sum(word.isupper() for word in re.findall(r"[\w'-]+", text)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text and "，" not in text,
}


@entry("reward", "instruction_following", reads_metadata=("instruction_id_list", "kwargs"))
def instruction_following(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when every instruction of the prompt is followed; the component `instructions` is the share that is.

    The prompt's `metadata` has `instruction_id_list` and `kwargs`, one entry an instruction, as in the dataset. An
    empty completion follows nothing: it would satisfy "no commas" and "fewer than 50 words". Strict: the completion is
    taken as it is. Raises ValueError for an instruction that is not known. Differs from the benchmark's program where
    that calls a library: sentences are split at . ! ? followed by a blank, `language:response_language` is refused, and
    the case rules look at case only, not at whether the text is English. Source: IFEval, arXiv:2311.07911.
    """
    names, arguments = prompt["metadata"]["instruction_id_list"], prompt["metadata"]["kwargs"]
    if not names or len(names) != len(arguments):
        raise ValueError(f"the prompt has {len(names)} instructions and arguments for {len(arguments)}")
    if unknown := [name for name in names if name not in RULES]:
        raise ValueError(f"there is no rule for the instruction {unknown[0]!r}; known are {', '.join(sorted(RULES))}")
    followed = [
        bool(completion.strip()) and RULES[name](completion, **{k: v for k, v in kwargs.items() if v is not None})
        for name, kwargs in zip(names, arguments, strict=True)
    ]
    return Reward(float(all(followed)), {"instructions": sum(followed) / len(followed)})
