"""GSM8K: the number after `####`."""

from collections.abc import Mapping
from typing import Any

from nanodag.registry import entry
from nanodag.rewards.reward import Reward, plain_number, right_or_wrong


@entry("reward", "gsm8k")
def gsm8k(prompt: Mapping[str, Any], completion: str) -> Reward:
    """1 when the completion has exactly one `#### number` and the number equals the answer's, by value.

    `#### 1,234`, `#### $1234.00` and `#### 1234.` are the same answer. The number is all that stands in the rest of
    that line; text on later lines is ignored. A completion with a second `####` is wrong: it would be
    a way to guess twice.
    The prompt's answer may be the number alone or a worked solution that ends in `#### number`.
    """
    wanted = plain_number(prompt["answer"].rpartition("####")[2])
    if wanted is None:
        raise ValueError(f"the prompt's answer {prompt['answer']!r:.80} has no number")
    _, *given = completion.split("####")
    found = plain_number(given[0].strip(" \t").partition("\n")[0]) if len(given) == 1 else None
    return right_or_wrong(found == wanted, "" if found is None else str(found))
