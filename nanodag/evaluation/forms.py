"""Forms of benchmarks: which YAML file a config names, and what stands in it. No torch and no lm-eval here."""

import importlib.util
from pathlib import Path
from typing import Any

import yaml

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.config.section import found_in
from nanodag.errors import ConfigError
from nanodag.errors.words import nearest
from nanodag.own_code.find import file_of
from nanodag.own_code.user_frame import with_place

FORMS = Path(__file__).parent / "benchmarks"
MAX_INCLUDES = 20
WRITTEN = "generate_until"
"""What lm-eval calls the output of a form whose items are answered in writing."""
OF_WRITTEN = ("num_samples", "temperature", "top_p", "top_k", "metrics", "stop", "thinking")
_LM_EVAL = Path(getattr(importlib.util.find_spec("lm_eval"), "origin", None) or "lm_eval/__init__.py").parent


def find_form(config: BenchmarkConfig, *, chat: bool) -> tuple[Path, bool]:
    """The YAML file that a benchmark is put in, and whether its prompts are a chat's.

    Raises ConfigError listing what is shipped, for a source that is missing, and for settings that the form would not
    look at: `template_options` and `system` where no chat template is used, `template_options` of worked examples,
    which are rendered with the question, and those of written answers where likelihoods are scored.
    """
    path, is_chat = _file_of(config, chat=chat)
    form, source, fewshot, why = read_form(path), config.source, config.fewshot, ""
    if source is not None and source.template_options and not is_chat:
        why = f" is put as plain text (form {path.stem}, chat: {str(chat).lower()}), so its source's template_options "
        why += "mean nothing; leave them out."
    elif fewshot is not None and fewshot.template_options:
        why = ": template_options of `fewshot` mean nothing, those of `source` count; leave them out."
    elif config.system and not is_chat:
        why = f" is put as plain text (form {path.stem}); leave out its `system`."
    elif source is None and ("custom_dataset" in form or config.limit or config.num_samples > 1):
        why = " needs `source:`, where its items come from."
    elif config.num_fewshot and fewshot is None and source is not None:
        why = f": num_fewshot {config.num_fewshot} needs `fewshot:`, a source of worked examples that are no items, "
        why += "such as the training split."
    if why:
        raise ConfigError(f"Benchmark {config.name!r}{why}")
    if form.get("output_type", WRITTEN) == WRITTEN:
        _check_written(config, path, form)
    else:
        check_likelihood(config)
    return path, is_chat


def is_written(config: BenchmarkConfig) -> bool:
    """True when a benchmark's items are answered in writing. Raises ConfigError for a form that does not exist."""
    return not config.is_core and read_form(_file_of(config, chat=True)[0]).get("output_type", WRITTEN) == WRITTEN


def check_served(config: BenchmarkConfig) -> None:
    """Raise ConfigError for a benchmark that a served model cannot be asked: it has answers, written or scored."""
    why = "is CORE" if config.is_core else ""
    if not why and read_form(_file_of(config, chat=True)[0]).get("output_type") == "loglikelihood_rolling":
        why = "is scored by the likelihood of whole texts"
    if config.is_environment:
        why = "is an environment"
    if why:
        more = "which an endpoint cannot be asked. Leave it out, or evaluate the model as the input `model`."
        raise ConfigError(f"Benchmark {config.name!r} {why}, {more}")


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


class FunctionName(str):
    """The dotted name of a function that a form names. folder: of the form."""

    folder: Path

    @property
    def module_beside(self) -> Path | None:
        """The function's module as a file in the folder, where lm-eval looks first; None where there is none."""
        path = self.folder / f"{self.rpartition('.')[0].replace('.', '/')}.py"
        return path if path.is_file() else None


class FormLoader(yaml.SafeLoader):
    """Reads lm-eval's forms without what their functions are. name: of the file, as a text from a stream has it."""

    def named(self, node: yaml.ScalarNode) -> FunctionName:
        name = FunctionName(node.value)
        name.folder = Path(self.name).parent
        return name


FormLoader.add_constructor("!function", FormLoader.named)


def read_form(path: Path) -> dict[str, Any]:
    """A form with those that it includes, `!function x` as FunctionName(x). Raises ConfigError for what is none."""
    form: dict[str, Any] = {}
    for _, part in reversed(_parts(path)):
        form |= part
    return form


def form_files(config: BenchmarkConfig) -> list[Path]:
    """The files that say how a benchmark is asked and scored, where they are not ours: forms for text and for chats,
    those that they include, and the modules of the functions that they name. Raises ConfigError for what is no form."""
    if not config.form.endswith(".yaml"):
        return []
    path = _file_of(config, chat=False)[0]
    for_chat = path.with_name(f"{path.stem}_chat.yaml")
    files: list[Path] = []
    for start in (path, for_chat) if for_chat.is_file() else (path,):
        for file, part in _parts(start):
            modules = (
                name.module_beside or file_of(name.rpartition(".")[0]) for _, name in found_in(part, FunctionName)
            )
            files += [file, *(module for module in modules if module is not None)]
    return [file for file in dict.fromkeys(files) if not file.is_relative_to(FORMS.parents[1])]


def _parts(path: Path, below: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """A form's file and what stands in it, then those that it includes; what comes first overrides the rest."""
    try:
        with path.open(encoding="utf-8") as stream:
            form = yaml.load(stream, Loader=FormLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no form of lm-eval's: {with_place(error)}") from error
    if not isinstance(form, dict):
        raise ConfigError(f"{path} is no form of lm-eval's: it holds no table")
    above = form.get("include", [])
    parts = [(path, form)]
    for inner in reversed([above] if isinstance(above, str) else above):
        if len(below) > MAX_INCLUDES:
            raise ConfigError(f"{below[0]} is no form of lm-eval's: it includes itself, or over {MAX_INCLUDES} others")
        parts += _parts(path.parent / inner, (*below, path))
    return parts


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
