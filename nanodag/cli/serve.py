"""`nanodag chat`, `serve` and `sampler serve`: find the models, then hand over to the process that has their tokenizers
or their engine. Light: each imports what it needs when it runs."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, cast

import typer

from nanodag.cli.parameters import File, ModelName, ModelStage, option
from nanodag.errors import ArtifactNotFound, ConfigError
from nanodag.errors.words import listed, nearest

if TYPE_CHECKING:
    from nanodag.inference.engine_install import Device

SERVING = "nanodag.chat.web"  # nanodag.api, and the page


class FoundModel(NamedTuple):
    """A model. facts: told to the chat page. adapter: folder over the other one, where both are wanted apart."""

    name: str
    folder: Path
    facts: dict[str, Any]
    adapter: Path | None = None


EMBEDDED = ("max_batch", "cache_bytes", "threads", "seed", "max_body_bytes", "max_text_bytes", "stream_every_s")
OWN = ("model-path", "model", "host", "port", "token", "api-key", "admin-api-key", "weight-version")


def chat(
    run: ModelName = "",
    stage: ModelStage = "",
    message: Annotated[str, option("chat.message", "--message", "-m")] = "",
    web: Annotated[bool, option("chat.web", "--web")] = False,
    also: Annotated[list[str] | None, option("chat.also")] = None,
    port: Annotated[int, option("chat.port")] = 8000,
    no_open: Annotated[bool, option("chat.no_open", "--no-open")] = False,
    file: File = "",
) -> None:
    """Talk to a model, in the terminal or in a browser. Ctrl-C ends an answer, Ctrl-D the talk.

    \b
    nanodag chat RUN sft
    nanodag chat RUN --message "What is 12*34?"
    nanodag chat RUN rl --web --also sft
    """
    if web:
        if message:
            raise ConfigError("--message asks one question in the terminal; leave out --web, or ask it on the page.")
        options = ["--no-access-log", f"--port={port}", *([] if no_open else ["--open"])]
        _serve(found_model(run, stage, file), run, also, file, options)
    if also:
        raise ConfigError("--also puts models side by side, which --web can show; the terminal talks to one.")
    model = found_model(run, stage, file)
    how = ["--alone"] if model.facts.get("has_turns") is False else []
    how += ["--no-tools"] if model.facts.get("has_calls") is False else []
    how += [f"--example={prompt}" for prompt in model.facts.get("prompts", ())[:2]]
    _hand_over("nanodag.chat", str(model.folder), *how, *(["--message", message] if message else []))


def serve(
    run: ModelName = "",
    stage: ModelStage = "",
    also: Annotated[list[str] | None, option("serve.also")] = None,
    follow: Annotated[bool, option("serve.follow", "--follow")] = False,
    engine: Annotated[str, option("serve.engine")] = "embedded",
    replicas: Annotated[int, option("serve.replicas")] = 1,
    served_model_name: Annotated[str, option("serve.served_model_name")] = "",
    no_access_log: Annotated[bool, option("serve.no_access_log", "--no-access-log")] = False,
    host: Annotated[str, option("host")] = "127.0.0.1",
    port: Annotated[int, option("serve.port")] = 8000,
    api_key_file: Annotated[str, option("serve.api_key_file")] = "",
    cors: Annotated[list[str] | None, option("serve.cors")] = None,
    option: Annotated[list[str] | None, option("serve.option", "--option", "-o")] = None,
    file: File = "",
) -> None:
    """Serve models by OpenAI's protocol. Ctrl-C ends it.

    \b
    nanodag serve RUN
    nanodag serve RUN rl --also sft --port 8080
    nanodag serve RUN --follow
    nanodag serve Qwen/Qwen3-0.6B --engine sglang
    """
    options = [f"--engine={engine}", f"--replicas={replicas}", f"--host={host}", f"--port={port}"]
    options += [f"--api-key-file={api_key_file}"] if api_key_file else []
    options += [f"--served-model-name={served_model_name}"] if served_model_name else []
    options += ["--no-access-log"] if no_access_log else []
    options += [f"--cors={origin}" for origin in cors or []] + [f"--{setting}" for setting in option or []]
    if follow:
        from nanodag.chat.web.facts import facts_of
        from nanodag.cli.show import find_run
        from nanodag.run.record import served_store

        store = served_store(file)
        record = find_run(store, run)
        model = FoundModel(record.run, Path(), facts_of(record, stage))  # the serving process finds its folder
        followed = [f"--follow={record.run}", f"--follow-stage={stage}"]
        options = [*followed, f"--store={store.url}", f"--store-local={store.local}", *options]
    else:
        model = found_model(run, stage, file, apart=engine == "vllm")
    _serve(model, run, also, file, options, apart=engine == "vllm")


def serve_sampler(
    model: Annotated[str, option("serve_sampler.model")],
    engine: Annotated[str, option("serve_sampler.engine")] = "auto",
    host: Annotated[str, option("host")] = "127.0.0.1",
    port: Annotated[int, option("serve_sampler.port")] = 30000,
    api_key_file: Annotated[str, option("serve_sampler.api_key_file")] = "",
    dtype: Annotated[str, option("serve_sampler.dtype")] = "auto",
    context_length: Annotated[int, option("serve_sampler.context_length")] = 0,
    deterministic: Annotated[
        bool | None, option("serve_sampler.deterministic", "--deterministic/--not-deterministic")
    ] = None,
    allow_host: Annotated[list[str] | None, option("serve_sampler.allow_host")] = None,
    option: Annotated[list[str] | None, option("serve_sampler.option", "--option", "-o")] = None,
    file: Annotated[str, option("serve_sampler.file")] = "",
) -> None:
    """Serve one sampler, for stages that name it in sampler.urls. Ctrl-C ends it.

    Its weights are replaced by those of the stage, so any model of the same shape will do. One stage at a time may use
    it.

    \b
    nanodag sampler serve --model RUN:sft --host 0.0.0.0 --api-key-file ~/key
    nanodag sampler serve --model Qwen/Qwen3-0.6B --engine sglang
    """
    from pydantic import ValidationError

    from nanodag.config.derive_sampler import engine_of, this_machine
    from nanodag.engines.start import foreground_command
    from nanodag.inference.addresses import keys_for
    from nanodag.inference.engine_install import TITLES
    from nanodag.inference.engine_settings import EngineSettings
    from nanodag.inference.number_formats import DTYPES
    from nanodag.model.architecture import check_sglang

    machine = this_machine()
    device = cast("Device", machine.device)
    if engine == "auto":
        engine, _ = engine_of(machine, device, None)
    if engine not in ("embedded", *TITLES):
        raise ConfigError(f"--engine {engine!r} is none of embedded, sglang, vllm and auto.")
    if dtype == "auto":
        dtype = "bfloat16" if machine.multiplies_bf16_fast(device) else "float32"
    if dtype not in DTYPES.values():
        raise ConfigError(f"--dtype {dtype!r} is neither float32 nor bfloat16 nor auto.")
    if engine != "embedded" and (deterministic or allow_host):
        raise ConfigError("--deterministic and --allow-host are of engine embedded; leave them out.")
    further: dict[str, Any] = {}
    for text in option or []:
        name, equals, value = text.partition("=")
        if not name:
            raise ConfigError(f"--option {text!r} is not OPTION=VALUE.")
        further[name] = {"": True, "true": True, "false": False}.get(value, value) if equals else True
        if name.replace("_", "-") in OWN:
            raise ConfigError(f"--option {name} is said otherwise: by --model, --host, --port or --api-key-file.")
    if engine == "embedded":
        further = {name.replace("-", "_"): value for name, value in further.items()}
        if unknown := [name for name in further if name not in EMBEDDED]:
            raise ConfigError(f"--option {unknown[0]}: there is no such option here. There are: {', '.join(EMBEDDED)}.")
        deterministic = device == "cpu" if deterministic is None else deterministic
        further |= {"deterministic": deterministic, "allow_host": allow_host or []}
    else:
        further = {"options": further}
    token = next(iter(keys_for(host, Path(api_key_file) if api_key_file else None)), "")
    folder = found_model(*(_named(model, "") if ":" in model else (model, "")), file).folder
    if engine == "sglang":
        check_sglang(folder, context_length or None, "--engine")
    try:
        settings = EngineSettings.model_validate({
            "engine": engine, "model": folder, "device": device, "dtype": dtype, "host": host, "port": port,
            "token": token, "context_length": context_length or None, **further,
        })  # fmt: skip
    except ValidationError as error:
        wrong = "; ".join(f"{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise ConfigError(f"--option {wrong}.") from error
    command, environment = foreground_command(settings)
    name = settings.host if settings.host not in ("0.0.0.0", "::") else os.uname().nodename
    typer.echo(f"A stage names it in sampler.urls as http://{name}:{port}{' FILE-OF-ITS-KEY' if api_key_file else ''}")
    os.execve(command[0], command, environment)  # in this process's place: a signal then reaches the server


def _serve(
    first: FoundModel, run: str, also: list[str] | None, file: str, options: Sequence[str], *, apart: bool = False
) -> NoReturn:
    """Serve a model and others beside it. also: stages of the same run, RUN:STAGE, folders or models of the hub.
    options: of the serving process. apart: as of `found_model`."""
    from nanodag.host.folders import state_folder
    from nanodag.run.record import served_store

    served = {first[0]: first}
    for other in also or ():
        model = found_model(*_named(other, run), file, apart=apart)
        served[other if model.name in served else model.name] = model
    about = {name: model.facts for name, model in served.items() if model.facts}
    runs = [facts["run"] for facts in about.values()]
    # Beside the runs, as an artifact's rollouts are not to be changed; of what is no run's, where a chat's history is.
    ratings = served_store(file).local / "ratings" / runs[0] if runs else state_folder() / "ratings"
    named = [f"--model={name}={model.folder}" for name, model in served.items() if model.folder.name]
    named += [f"--adapter={name}={model.adapter}" for name, model in served.items() if model.adapter]
    typer.echo(f"Loading {listed(served)}; a line says when they answer, mostly within 30 s.", err=True)
    with TemporaryFile() as facts:  # an argument is read by others in `ps`, and is no longer than 128 KiB
        facts.write(json.dumps(about).encode())
        facts.seek(0)
        os.set_inheritable(facts.fileno(), True)
        _hand_over(SERVING, *named, f"--about=/dev/fd/{facts.fileno()}", f"--ratings={ratings}", *options)


def _hand_over(program: str, *arguments: str) -> NoReturn:
    """Run a program of ours in this process's place, not as its child: signals then reach it, and Ctrl-C ends an
    answer, not a parent that waits."""
    from nanodag.host.machine import detect
    from nanodag.host.processor import usable_cores
    from nanodag.worker.launch import worker_environment

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


def found_model(name: str, stage: str, file: str, *, apart: bool = False) -> FoundModel:
    """The model of a run's stage, the last one there is unless named; of a folder, or of the hub, of which no facts are
    known. apart: adapters that a stage left alone are not merged."""
    if _is_elsewhere(name):
        if stage:
            raise ConfigError(f"{name} is a model by itself and has no stage {stage!r}.")
        from nanodag.model.model_source import fetched

        is_folder, hub_name = Path(name).exists(), name.removeprefix("hub:")
        model = fetched(f"file:{name}" if is_folder else f"hub:{hub_name}")
        return FoundModel(Path(name).resolve().name if is_folder else hub_name, model, {})
    from rich.console import Console

    from nanodag.chat.web.facts import facts_of
    from nanodag.cli.show import find_run, finished_stages, print_stale
    from nanodag.config.kind import MODEL
    from nanodag.run.record import served_store

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
    artifact, facts = store.get(f"{record.run}:{chosen}"), facts_of(record, chosen)
    folder, adapter = store.apart(artifact) if apart else (store.materialize(artifact), None)
    return FoundModel(chosen, folder, facts, adapter)
