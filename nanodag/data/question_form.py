"""Form of a source's questions: the text around them, their template switches, and who judges the answer.

This comes after a row was adapted and after it was held out or not. So one problem is on one side of that with and
without an instruction, and contamination is looked for in the data's own words.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from nanodag.data.adapters import renamed
from nanodag.data.config import QUESTION, SourceConfig
from nanodag.data.records import Kind
from nanodag.errors import SourceError
from nanodag.errors.words import listed
from nanodag.host.beside import table_beside

Record = dict[str, Any]
_WITHOUT_EFFECT: Mapping[str, Sequence[str]] = table_beside(__file__)


def check_effect(source: SourceConfig, read_as: Kind | Literal["row", "text"]) -> None:
    """Raise SourceError for a setting of a source that changes nothing of what it is read as."""
    called, *names = _WITHOUT_EFFECT[read_as]
    for name in names:
        if (value := getattr(source, name)) != type(source).model_fields[name].default:
            raise SourceError(f"{source.url}: {name} {value!r} means nothing to {called}. Leave it out.")


def with_names(row: Record, source: SourceConfig) -> Record:
    """A row with the names that `columns` gives its columns too. Raises SourceError for a column that is not there."""
    try:
        return renamed(row, source.columns)
    except KeyError as error:
        raise SourceError(f"{source.url}: there is no column {error}, only {listed(sorted(row))}.") from error


def asking(source: SourceConfig, kind: Kind) -> Callable[[Record], Record]:
    """The function that turns a record of an adapter into one as the source asks it.

    `instruction` goes around the one user turn; `reward` takes the place of the adapter's; `template_options` stand in
    the record under that name. Raises SourceError for a setting that means nothing to the kind; the function raises it
    for a record with an instruction and not exactly one user turn.
    """
    check_effect(source, kind)
    added: Record = {} if source.reward == "auto" else {"reward": source.reward}
    if source.template_options:
        added["template_options"] = dict(source.template_options)

    def ask(record: Record) -> Record:
        if source.instruction == QUESTION:
            return {**record, **added} if added else record
        messages = list(record["messages"])
        places = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if len(places) != 1:
            raise SourceError(
                f"{source.url}: instruction is put around one question, and a record has {len(places)} user turns. "
                "Leave it out, or slice the source."
            )
        question = messages[places[0]]
        messages[places[0]] = {**question, "content": _around(question["content"], source.instruction)}
        return {**record, "messages": messages, **added}

    return ask


def _around(content: Any, instruction: str) -> Any:
    """The content with its text put into the instruction; images stay before or behind it, where they stood."""
    if isinstance(content, str):
        return instruction.replace(QUESTION, content)
    texts = [part for part in content if part["type"] == "text"]
    if len(texts) != 1:
        raise SourceError(f"instruction is put around one text, and a question with images has {len(texts)}.")
    put = {"type": "text", "text": instruction.replace(QUESTION, texts[0]["text"])}
    return [put if part is texts[0] else part for part in content]
