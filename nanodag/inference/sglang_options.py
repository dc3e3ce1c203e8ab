"""Options of SGLang's server as the config passes them through, and what it does not compute."""

from collections.abc import Mapping

from nanodag.errors import ConfigError
from nanodag.host.beside import table_beside

Option = bool | int | float | str

_NAMES = table_beside(__file__)
OWN_OPTIONS, ONLY_FIELDS = frozenset(_NAMES["own"]), frozenset(_NAMES["fields"])
NOT_TAKEN: Mapping[str, str] = _NAMES["not_taken"]


def check_options(options: Mapping[str, Option]) -> None:
    """Raise ValueError for an option that is not for the user to give."""
    for name, value in options.items():
        # Its parser takes abbreviations, too.
        if any(known.startswith(name.replace("_", "-")) for known in OWN_OPTIONS):
            raise ValueError(f"sampler.options.{name} follows from other fields of the config; leave it out")
        if instead := next((NOT_TAKEN[known] for known in NOT_TAKEN if known.startswith(name.replace("_", "-"))), ""):
            raise ValueError(
                f"sampler.options.{name} {value} makes a server that takes no weights while it runs; leave it out, and "
                f"{instead}"
            )


def arguments(settings: Mapping[str, Option]) -> list[str]:
    """`--name=value` each; a flag alone where it is true, nothing where it is false."""
    return [
        f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
        for name, value in settings.items()
        if value is not False  # 0 is a value
    ]


def check_no_window(window: int | None, context: int, setting: str) -> None:
    """Raise ConfigError for a sliding window shorter than the context, in tokens, of a model that SGLang is to sample:
    it computes the model types that are trained here without. setting: that asks for SGLang."""
    if window is not None and window < context:
        raise ConfigError(
            f"{setting}: sglang leaves out the model's sliding window of {window} tokens, and contexts have up to "
            f"{context}; its answers would not be the model's. Set it to embedded."
        )
