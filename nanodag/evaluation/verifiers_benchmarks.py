"""Benchmarks of form `verifiers`: each item is a rollout in an environment of the `verifiers` package.

    - {name: boxes, form: verifiers, source: "verifiers:boxes?size=200&seed=9", options: {agent.max_turns: 4}}

The stage's samplers stand behind the API of nanodag.api, on loopback and with a key of their own. The environment asks
it as it asks any other model. The main metric is the reward; the rubric's parts and the metrics stand beside it.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nanodag.api.application import application, quiet_server
from nanodag.api.served_model import Limits, ServedModel, TokenText
from nanodag.children.forks import EpisodeFailed, EpisodeLost
from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.urls import SourceURL, parse_url
from nanodag.errors import ConfigError, StageFailed
from nanodag.evaluation.benchmark import sampling_params
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.items import held_out_records, select
from nanodag.evaluation.results import Answer, BenchmarkResult, Judged, result_of, written_record
from nanodag.evaluation.writing import SGLANG_CONTEXT, SamplerSettings, fleet_of, replicas_for
from nanodag.external_envs.verifiers_process import VerifiersProcess, block_of
from nanodag.host.folders import Scratch
from nanodag.host.ports import LOOPBACK
from nanodag.host.threads import all_of
from nanodag.model.architecture import read_checkpoint
from nanodag.model.headers import matrix_parameters
from nanodag.store.kept_lines import content_key
from nanodag.tokenizer.chat import load_renderer

log = logging.getLogger(__name__)

FORM = "verifiers"
MODEL = "policy"
TURNS = 4  # guessed, of a rollout: how many samplers are worth their start
MOST_FAILED = 0.25
PLAYS_ALONE = 2  # of a rollout whose process ended
TIMEOUT_S = 86400.0

Item = dict[str, Any]


def run_environment(
    model: EvaluatedModel, config: BenchmarkConfig, *, chat: bool, seed: int, mirror: str
) -> BenchmarkResult:
    """Evaluate one benchmark. Rollouts that `model.kept` has are not run again.

    A rollout that fails counts as reward 0, with the reason in its record. Raises ConfigError for a source that is no
    taskset, for settings that mean nothing here and for an environment that cannot start, StageFailed when more than
    MOST_FAILED of the rollouts fail.
    """
    items, source = _items(config, chat=chat, seed=seed, mirror=mirror)
    params = partial(sampling_params, config, seed=seed, max_new_tokens=model.max_new_tokens, until=())
    tasks = [
        (item["record"]["metadata"]["task"], params(item_id=item["item_id"], sample=sample).model_dump(mode="json"))
        for item in items
        for sample in range(config.num_samples)
    ]
    of_taskset = {f"taskset.{name}": value for name, value in source.parameters.items()}
    outcomes = asyncio.run(_outcomes(model, block_of(source.path, {**of_taskset, **config.options}), tasks))
    failed = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if len(failed) > MOST_FAILED * len(outcomes):
        raise StageFailed(f"Benchmark {config.name!r}: {len(failed)} of {len(outcomes)} rollouts failed: {failed[0]}")
    if failed:
        log.warning("%s: %d of %d rollouts failed and count as 0: %s", config.name, len(failed), len(tasks), failed[0])
    names = dict.fromkeys(name for outcome in outcomes for name in outcome["scores"])
    groups = [outcomes[n : n + config.num_samples] for n in range(0, len(outcomes), config.num_samples)]
    return result_of(
        config,
        form=FORM,
        is_chat=True,
        base_metric="reward",
        records=[_record(config, item, group, list(names)) for item, group in zip(items, groups, strict=True)],
    )


def _items(config: BenchmarkConfig, *, chat: bool, seed: int, mirror: str) -> tuple[list[Item], SourceURL]:
    """The tasks, drawn as the benchmark's limit says, and where they are from."""
    if config.source is None or parse_url(config.source.url).kind != FORM:
        raise ConfigError(f"Benchmark {config.name!r} (form verifiers) needs a source such as verifiers:my_module.")
    for name, is_set in (
        ("chat: false", not chat), ("num_fewshot", config.num_fewshot), ("stop", config.stop),
        ("system", config.system), ("thinking", config.thinking),
    ):  # fmt: skip
        if is_set:
            raise ConfigError(f"Benchmark {config.name!r}: {name} means nothing to form verifiers; leave it out.")
    records = held_out_records(config.source, "prompt", Path(mirror) if mirror else None)
    items = select(((row, {"record": record}) for _, row, record in records), config.limit, seed)
    return items, parse_url(config.source.url)


async def _outcomes(
    model: EvaluatedModel, block: Mapping[str, Any], tasks: Sequence[tuple[Any, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Outcome of each rollout, in order: `scores`, `reply` and `is_cut`, or `error` too. block: verifiers' own. tasks:
    each with its sampling parameters."""
    settings, kept = model.sampler_settings, model.kept
    keys = [content_key("environment", block, *task) for task in tasks]
    outcomes = [None if kept is None else kept.get(key) for key in keys]
    missing = [number for number, outcome in enumerate(outcomes) if outcome is None]
    flops = 2.0 * matrix_parameters(model.folder) * sum(TURNS * tasks[n][1]["max_new_tokens"] for n in missing)
    replicas = replicas_for(settings, flops)
    places = asyncio.Semaphore(replicas * int(settings.config.max_batch))
    process = VerifiersProcess(block)
    lost: list[int] = []

    async def play(number: int, base_url: str, key: str) -> None:
        task, params = tasks[number]
        async with places:
            try:
                outcome = await process.rollout(
                    task, base_url=base_url, api_key=key, model=MODEL, sampling=_sampling(params)
                )
            except EpisodeFailed as error:
                if isinstance(error, EpisodeLost):
                    lost.append(number)
                result: dict[str, Any] = {"scores": {"reward": 0.0}, "reply": "", "is_cut": False, "error": str(error)}
            else:
                parts = {**outcome["components"], **outcome["metrics"], "turns": float(outcome["turns"])}
                scores = {"reward": outcome["reward"], **parts}
                result = {"scores": scores, "reply": outcome["reply"], "is_cut": outcome["is_cut"]}
                model.tokens_read += outcome["prompt_tokens"]
                model.tokens_written += outcome["completion_tokens"]
        outcomes[number] = result
        if kept is not None and "error" not in result:
            kept.add({keys[number]: result})
        num_open = sum(outcome is None for outcome in outcomes)
        model.on_progress(len(missing) - num_open, len(missing))

    if missing:
        model.close()  # samplers of an earlier benchmark
        try:
            async with _served(settings, replicas) as (base_url, key):
                await all_of(play(number, base_url, key) for number in missing)
                for _ in range(PLAYS_ALONE):  # another rollout may have ended the process
                    again = sorted(lost)
                    lost.clear()
                    for number in again:
                        await play(number, base_url, key)
        finally:
            await process.close()
    return [outcome for outcome in outcomes if outcome is not None]


def _sampling(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings of each call of a rollout. A rollout's seed is that of all its calls: their prompts differ."""
    settings = {"temperature": params["temperature"], "top_p": params["top_p"], "max_tokens": params["max_new_tokens"]}
    if params["top_k"] > 0:
        settings["top_k"] = params["top_k"]
    if params["sampling_seed"] is not None:
        settings["seed"] = params["sampling_seed"]
    return settings


def _record(
    config: BenchmarkConfig, item: Item, outcomes: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any]:
    return written_record(
        config,
        item_id=item["item_id"],
        prompt=item["record"]["messages"][-1]["content"],
        target="",
        answers=[Answer(outcome["reply"], ending="length" if outcome["is_cut"] else "stop") for outcome in outcomes],
        judged=[
            Judged(
                scores={name: float(outcome["scores"].get(name, 0.0)) for name in names},
                parsed=outcome["reply"].strip() or "-",
                details={"error": outcome["error"]} if "error" in outcome else {},
            )
            for outcome in outcomes
        ],
    )


@asynccontextmanager
async def _served(settings: SamplerSettings, replicas: int) -> AsyncIterator[tuple[str, str]]:
    """The address and the key of the API over samplers of a model, as long as the context lasts."""
    folder, key = settings.folder, secrets.token_urlsafe(32)
    architecture = read_checkpoint(folder).architecture
    context = min(architecture.max_positions, SGLANG_CONTEXT)
    with Scratch("environment") as logs, socket.create_server((LOOPBACK, 0), backlog=1024) as listener:
        fleet = fleet_of(settings, context, replicas, logs=logs, name=MODEL)
        model = ServedModel(
            name=MODEL,
            tokens=TokenText(folder),
            renderer=load_renderer(folder),
            backend=fleet,
            context_length=context,
            vocab_size=architecture.vocab_size,
            is_sglang=settings.config.engine == "sglang",
        )
        limits = Limits(max_waiting=1 << 20, request_timeout_s=TIMEOUT_S)
        server = quiet_server(application({MODEL: model}, limits=limits, keys=[key]))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined] # the worker has its own
        try:
            await fleet.start(replicas)
            serving = asyncio.create_task(server._serve(sockets=[listener]))
            yield f"http://{LOOPBACK}:{listener.getsockname()[1]}/v1", key
            server.should_exit = True
            await serving
        finally:
            await fleet.end()
