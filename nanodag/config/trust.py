"""Which code of a user's own a pipeline may name: modules beside its file, and those of its `trusted_modules`.

Sources (`python:`), adapters, rewards and the other entries of RL name functions as `module:function`. Presets and
overrides come from elsewhere too, as a flow run's parameters do; they are data, so they may choose among functions that
the pipeline file vouches for, and no others. `trusted_modules` stands in the file alone (nanodag.config.resolve).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanodag import registry
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.config.pipeline import Pipeline
from nanodag.config.rl_entries import entries_in
from nanodag.config.section import found_in
from nanodag.data.config import SourceConfig
from nanodag.data.lists import GENERATORS
from nanodag.data.urls import parse_url
from nanodag.errors import ConfigError
from nanodag.own_code.vouched import Voucher

SHIPPED = frozenset(f"nanodag.data.lists:{name}" for name in GENERATORS)


def check_trust(pipeline: Pipeline, file: Path) -> None:
    """Raise ConfigError for the first function that a pipeline names without its file vouching for the module."""
    check_forms(pipeline, file)
    voucher = Voucher(file=file, trusted_modules=pipeline.trusted_modules)
    for where, name in named_functions(pipeline):
        if name in SHIPPED or registry.is_shipped(name):
            continue
        voucher.check(where, name)


def check_forms(pipeline: Pipeline, file: Path) -> None:
    """Raise ConfigError for a benchmark's form that is a YAML file from elsewhere: such a file names functions, which
    are imported from beside it."""
    for name, stage in pipeline.stages.items():
        for _, benchmark in found_in(stage, BenchmarkConfig):
            form = benchmark.form
            of_lm_eval = form.startswith("lm_eval:")
            parts = Path(form.removeprefix("lm_eval:")).parts
            is_elsewhere = (
                (".." in parts or form.removeprefix("lm_eval:").startswith("/"))
                if of_lm_eval
                else form.endswith(".yaml") and not Path(form).resolve().is_relative_to(file.parent.resolve())
            )
            if is_elsewhere:
                raise ConfigError(
                    f"stage {name}: the form {form} of benchmark {benchmark.name} lies elsewhere, and a form may name "
                    f"functions. Put it below {file.parent}, or name one of lm-eval's as lm_eval:folder/file.yaml."
                )


def named_functions(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Where in a pipeline a function stands, and its `module:function`."""
    for source in sources_in(pipeline):
        if (url := parse_url(source.url)).kind == "python":
            yield source.url, url.path
        if ":" in source.adapter:
            yield f"adapter of {source.url}", source.adapter
    for name, stage in pipeline.stages.items():
        for _, entry in entries_in(stage):
            if entry.own_function:
                yield f"stage {name}", entry.own_function


def sources_in(value: Any) -> list[SourceConfig]:
    """Every source that a config names, at any depth."""
    return [source for _, source in found_in(value, SourceConfig)]
