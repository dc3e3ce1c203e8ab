"""Code of a user's own that a pipeline may name: modules beside its file, and those of its `trusted_modules`.

Sources (`python:`), adapters, rewards and the other entries of RL name functions as `module:function`. Presets and
overrides come from elsewhere too, as a flow run's parameters do; they are data, so they may choose among functions that
the pipeline file vouches for, and no others. `trusted_modules` stands in the file alone (nanodag.config.resolve).
"""

import re
from pathlib import Path
from typing import Any

from nanodag import registry
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.config.pipeline import Pipeline
from nanodag.config.rl_parts import EntryConfig, GenerateConfig
from nanodag.config.section import found_in
from nanodag.data import lists, picture_problems, spelling
from nanodag.data.config import SourceConfig
from nanodag.data.urls import parse_url
from nanodag.errors import ConfigError
from nanodag.own_code.trusted_modules import Voucher

SHIPPED = frozenset(
    f"{module.__name__}:{name}" for module in (lists, picture_problems, spelling) for name in module.GENERATORS
)


def check_trust(pipeline: Pipeline, file: Path) -> None:
    """Raise ConfigError for the first function that a pipeline names without its file vouching for the module, and for
    a benchmark's form that is a YAML file from elsewhere: it names functions, which are imported from beside it."""
    voucher = Voucher(file=file, trusted_modules=pipeline.trusted_modules)
    for _, source in found_in(pipeline, SourceConfig):
        url = parse_url(source.url)
        named = {source.url: url.path.replace("-", "_")} if url.kind in ("python", "verifiers") else {}
        if ":" in source.adapter:
            named[f"adapter of {source.url}"] = source.adapter
        for where, name in named.items():
            if name not in SHIPPED:
                voucher.check(where, name)
    for stage_name, stage in pipeline.stages.items():
        for _, benchmark in found_in(stage, BenchmarkConfig):
            if is_elsewhere(benchmark.form, pipeline, file):
                raise ConfigError(
                    f"stage {stage_name}: the form {benchmark.form:.200} of benchmark {benchmark.name} lies elsewhere, "
                    f"and a form may name functions. Put it below {file.parent}, or name one of lm-eval's as "
                    "lm_eval:folder/file.yaml."
                )
        for _, entry in found_in(stage, EntryConfig):
            if entry.own_function and not registry.is_shipped(entry.own_function):
                voucher.check(f"stage {stage_name}", entry.own_function)
            if module := entry.own("module"):
                voucher.check(f"stage {stage_name}", module.replace("-", "_"))


def check_agents(pipeline: Pipeline, stages: Any) -> None:
    """Raise ConfigError for an agent's program that an override names. stages: as the file has them, which may lack
    settings that only an override gives."""
    for where, generate in found_in(pipeline.stages, GenerateConfig):
        if generate.programs and generate.programs != _programs_at(stages, where):
            raise ConfigError(
                f"{where} names the agent's program {generate.programs!r:.300}, and with server.agents_of_file the "
                "pipeline file alone may: write it there."
            )


def _programs_at(stages: Any, where: str) -> dict[str, Any]:
    """The program that the file names at a place; none where what it says there is no function."""
    value = stages
    try:
        for part in where.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return GenerateConfig.model_validate(value).programs
    except (LookupError, TypeError, ValueError):
        return {}


def is_elsewhere(form: str, pipeline: Pipeline, file: Path) -> bool:
    """True where a form is neither shipped, nor lm-eval's, nor a file below the pipeline file's folder that is not in
    the store, where others write."""
    if form.startswith("lm_eval:"):
        inner = form.removeprefix("lm_eval:")
        return inner.startswith("/") or ".." in Path(inner).parts
    if not form.endswith(".yaml"):
        return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", form) is None
    path = Path(form).resolve()
    stores = [Path(folder).resolve() for folder in (pipeline.store.url, pipeline.store.local) if "://" not in folder]
    return not path.is_relative_to(file.parent.resolve()) or any(path.is_relative_to(store) for store in stores)
