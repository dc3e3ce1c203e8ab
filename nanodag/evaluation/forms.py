"""How benchmarks are asked: which YAML file a config names, and what stands in it. No torch here, and lm-eval is not
imported."""

import importlib.util
from pathlib import Path
from typing import Any

import yaml

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.errors import ConfigError
from nanodag.errors.words import nearest
from nanodag.own_code.blame import with_place

FORMS = Path(__file__).parent / "benchmarks"
MAX_INCLUDES = 20
WRITTEN = "generate_until"
"""What lm-eval calls the output of a form whose items are answered in writing."""
OF_WRITTEN = ("num_samples", "temperature", "top_p", "top_k", "metrics", "stop", "thinking")
_LM_EVAL = Path(getattr(importlib.util.find_spec("lm_eval"), "origin", None) or "lm_eval/__init__.py").parent


def find_form(config: BenchmarkConfig, *, chat: bool) -> tuple[Path, bool]:
    """The YAML file that a benchmark is put in, and whether its prompts are a chat's.

    Raises ConfigError listing what is shipped, and for settings that the form would not look at: `template_options` and
    `system` where no chat template is used, `template_options` of worked examples, which are rendered with the
    question, and those of written answers where likelihoods are scored.
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
    if config.system and not is_chat:
        raise ConfigError(f"Benchmark {config.name!r} is put as plain text (form {path.stem}); leave out its `system`.")
    form = read_form(path)
    if form.get("output_type", WRITTEN) == WRITTEN:
        _check_written(config, path, form)
    else:
        check_likelihood(config)
    return path, is_chat


def is_core(config: BenchmarkConfig) -> bool:
    """Whether a benchmark is CORE, which has no YAML file."""
    return "core" in (config.form, config.name)


def is_written(config: BenchmarkConfig) -> bool:
    """Whether a benchmark's items are answered in writing. Raises ConfigError for a form that does not exist."""
    return not is_core(config) and read_form(_file_of(config, chat=True)[0]).get("output_type", WRITTEN) == WRITTEN


def check_likelihood(config: BenchmarkConfig) -> None:
    """Raise ConfigError for a setting of written answers: the benchmark has none."""
    for name in OF_WRITTEN:
        if getattr(config, name) != BenchmarkConfig.model_fields[name].default:
            raise ConfigError(
                f"Benchmark {config.name!r} is scored by likelihood, so its {name} means nothing; leave it out."
            )


def _check_written(config: BenchmarkConfig, path: Path, form: dict[str, Any]) -> None:
    settings = form.get("generation_kwargs") or {}
    if int(form.get("repeats", 1)) > 1:
        raise ConfigError(
            f"Benchmark {config.name!r}: {path.name} has repeats {form['repeats']}. Name a form without, and set "
            "num_samples and metrics of the benchmark."
        )
    if (settings.get("do_sample") or settings.get("temperature", 0) > 0) and not config.temperature:
        raise ConfigError(
            f"Benchmark {config.name!r} would be answered greedily, and {path.name} asks for {settings}. Set "
            f"temperature: {settings.get('temperature') or 1.0} of the benchmark, or include the form in one with "
            "do_sample: false."
        )


class FormLoader(yaml.SafeLoader):
    """Reads lm-eval's forms without what their functions are."""


class FunctionName(str):
    """The dotted name of a function that a form names."""

    __slots__ = ()


FormLoader.add_constructor("!function", lambda loader, node: FunctionName(node.value))


def read_form(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML file of lm-eval's with the one that it includes; `!function x` as FunctionName(x). Raises ConfigError for
    what is none."""
    try:
        form = yaml.load(path.read_text(encoding="utf-8"), Loader=FormLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no form of lm-eval's: {with_place(error)}") from error
    if not isinstance(form, dict):
        raise ConfigError(f"{path} is no form of lm-eval's: it holds no table")
    above = form.get("include")
    if isinstance(above, str) and len(below) > MAX_INCLUDES:
        raise ConfigError(f"{below[0]} is no form of lm-eval's: it includes itself, or over {MAX_INCLUDES} others")
    return {**read_form(path.parent / above, (*below, path)), **form} if isinstance(above, str) else form


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
