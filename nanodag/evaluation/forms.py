"""How benchmarks are asked: which YAML file a config names. No torch here, and lm-eval is not imported."""

import importlib.util
from pathlib import Path

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.errors import ConfigError
from nanodag.errors.words import nearest

FORMS = Path(__file__).parent / "benchmarks"
_LM_EVAL = Path(getattr(importlib.util.find_spec("lm_eval"), "origin", None) or "lm_eval/__init__.py").parent


def find_form(config: BenchmarkConfig, *, chat: bool) -> tuple[Path, bool]:
    """The YAML file that a benchmark is put in, and whether its prompts are a chat's.

    Raises ConfigError listing what is shipped, and for `template_options` where no chat template is used, or of worked
    examples, which are rendered with the question.
    """
    path, is_chat = _file_of(config, chat=chat)
    if config.source is not None and config.source.template_options and not is_chat:
        raise ConfigError(
            f"Benchmark {config.name!r} is put as plain text (form {path.stem}, chat: {str(chat).lower()}), so its "
            "source's template_options mean nothing; leave them out."
        )
    if config.fewshot is not None and config.fewshot.template_options:
        raise ConfigError(
            f"Benchmark {config.name!r}: template_options of `fewshot` mean nothing, those of `source` count; leave "
            "them out."
        )
    return path, is_chat


def _file_of(config: BenchmarkConfig, *, chat: bool) -> tuple[Path, bool]:
    named = config.name if config.form == "auto" else config.form
    if named.startswith("lm_eval:"):
        path = _LM_EVAL / "tasks" / named.removeprefix("lm_eval:")
    elif named.endswith(".yaml"):
        path = Path(named).absolute()
    else:
        path = FORMS / f"{named}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"Benchmark {config.name!r} has no form {named!r} ({path} does not exist). Shipped are "
            f"{', '.join(shipped_forms())}. Name one with `form:`, or a YAML file of lm-eval's as "
            f"lm_eval:folder/file.yaml, or any by path.{nearest(named, shipped_forms())}"
        )
    for_chat = path.with_name(f"{path.stem}_chat.yaml")
    if chat and for_chat.is_file():
        return for_chat, True
    return path, False


def shipped_forms() -> list[str]:
    """Names of the forms in benchmarks/."""
    return sorted(path.stem for path in FORMS.glob("*.yaml") if not path.stem.endswith("_chat"))
