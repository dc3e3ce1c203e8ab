"""`nanodag serve` and `chat`: find the models, then hand over to the process that has their tokenizers."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from nanodag.cli.show import find_run, finished_stages, print_stale
from nanodag.config.kind import MODEL
from nanodag.errors import ArtifactNotFound, ConfigError
from nanodag.errors.words import listed, nearest
from nanodag.host.machine import detect
from nanodag.host.processor import usable_cores
from nanodag.run.record import served_store
from nanodag.worker.launch import worker_environment

SERVING = "nanodag.chat.web"  # nanodag.api, and the page


def serve(
    name: str, stage: str, *, also: Sequence[str], is_following: bool, file: str, options: Sequence[str]
) -> NoReturn:
    """Serve a run's stage, a folder or a model of the hub. also: stages of the same run, RUN:STAGE, folders or models
    of the hub. is_following: the newest weights of a run under way. options: of the serving process."""
    followed: list[str] = []
    if is_following:
        store = served_store(file)
        followed = [f"--follow={find_run(store, name).run}", f"--follow-stage={stage}"]
        followed += [f"--store={store.url}", f"--store-local={store.local}"]
    models = dict([] if is_following else [found_model(name, stage, file)])
    for other in also:
        model_name, folder = found_model(*_named(other, name), file)
        models[other if model_name in models else model_name] = folder
    # It ends the engines, so a signal must reach it.
    _hand_over(
        SERVING, *(f"--model={model_name}={folder}" for model_name, folder in models.items()), *followed, *options
    )


def chat_with(name: str, stage: str, *, file: str, options: Sequence[str] = ()) -> NoReturn:
    """Hand over to the chat program with the model of a run's stage, the last one there is unless named; with a folder,
    or a model of the hub. options: of the program."""
    _, folder = found_model(name, stage, file)
    # In this process's place, not as its child: Ctrl-C ends an answer, and must not end a parent that waits.
    _hand_over("nanodag.chat", str(folder), *options)


def _hand_over(program: str, *arguments: str) -> NoReturn:
    """Run a program of ours in this process's place, not as its child: signals then reach it."""
    environment = worker_environment(usable_cores(), device=detect().device)
    os.execve(sys.executable, [sys.executable, "-m", program, *arguments], environment)


def _named(text: str, run: str) -> tuple[str, str]:
    """The run and stage that RUN:STAGE, or STAGE of this run, names; a folder or a model of the hub by itself."""
    if _is_elsewhere(text):
        return text, ""
    other, colon, stage = text.rpartition(":")
    return (other if colon else run), stage


def _is_elsewhere(name: str) -> bool:
    """True for a model that is no run's: a folder, or one of the hub."""
    return "/" in name or (Path(name) / "config.json").is_file()


def found_model(name: str, stage: str, file: str) -> tuple[str, Path]:
    if _is_elsewhere(name):
        if stage:
            raise ConfigError(f"{name} is a model by itself and has no stage {stage!r}.")
        from nanodag.model.model_source import fetched

        is_folder, hub_name = Path(name).exists(), name.removeprefix("hub:")
        model = fetched(f"file:{name}" if is_folder else f"hub:{hub_name}")
        return Path(name).resolve().name if is_folder else hub_name, model
    store = served_store(file)
    record = find_run(store, name)
    models = finished_stages(record, MODEL)
    if stage and stage not in models:
        raise ArtifactNotFound(
            f"Run {record.run} has no finished model {stage!r}; it has {listed(models)}.{nearest(stage, models)}"
        )
    if not models:
        raise ArtifactNotFound(f"Run {record.run} has no finished model yet.")
    chosen = stage or models[-1]
    print_stale(Console(stderr=True, highlight=False), record, chosen)
    return chosen, store.materialize(store.get(f"{record.run}:{chosen}"))
