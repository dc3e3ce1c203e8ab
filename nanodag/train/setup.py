"""Parts of the loop by a job: model, data, held-out data, sizes, samples, export."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import torch

from nanodag.config.kinds import find_kind
from nanodag.config.supervised import SupervisedStage
from nanodag.data.adapters import kind_of
from nanodag.data.config import SourceConfig, mixes_by_epochs
from nanodag.data.core_tasks import TASKS, bundle_url, find_files
from nanodag.data.digests import file_sha256
from nanodag.data.opening import Part, open_source
from nanodag.errors import ConfigError
from nanodag.host.images import SETTINGS_FILES
from nanodag.host.processor import usable_cores
from nanodag.model.adapter_folder import leave_adapter
from nanodag.model.architecture import Architecture, read_checkpoint
from nanodag.model.build import initialise, qwen3_architecture
from nanodag.model.decoder import Decoder
from nanodag.model.extension import extended
from nanodag.model.folder import CausalModel, load, save
from nanodag.model.folder_size import size_of
from nanodag.model.fp8_linear import fp8_linear
from nanodag.model.headers import weight_files
from nanodag.model.lora import ADAPTER, add_lora, merged, save_adapter
from nanodag.model.scorer import ScalarHead
from nanodag.own_code.find import required_file
from nanodag.own_code.functions import function_at
from nanodag.store.checkpoints import Checkpoints
from nanodag.tokenizer.encoding import Encoding
from nanodag.train.batches import TokenBatches, tokenising_threads
from nanodag.train.checkpoint import newest_of_all, planned_steps
from nanodag.train.deepspeed_engine import TrainEngine
from nanodag.train.held_out_rows import held_out_rows, kept_table
from nanodag.train.objective import NextToken, Objective
from nanodag.train.packing import Batch, make_batch
from nanodag.train.peak import matmul_peak
from nanodag.train.sequence_parallel import SequenceGroup, join
from nanodag.train.validation import ValidationLoss, core_accuracies, greedy, score_objective, score_text, uncompiled
from nanodag.worker.job import Job

log = logging.getLogger(__name__)


class PreparedStage:
    """Everything that the loop needs on this rank, made of the job's config and inputs. source: its data. validation:
    None without held-out data. checkpoint: the one to go on from.

    num_steps: optimizer steps. flops_per_token: forward and backward; matrix_flops_per_token: without attention.
    peak_flops: matmul peak of all ranks, a second.
    """

    def __init__(self, job: Job) -> None:
        self.job = job = with_extension(job)
        self.config = config = cast(SupervisedStage, job.config)
        assert config.precision != "auto"  # derived
        torch.set_num_threads(int(config.resources.threads))
        self.tokenizer_path = job.inputs["model" if "model" in job.inputs else "tokenizer"]
        self.model = _model(job, self.tokenizer_path)
        self.engine = engine = TrainEngine(
            self.model,
            optimizer=config.optimizer,
            zero_stage=config.zero_stage,
            precision="bf16" if config.precision == "fp8" else config.precision,
            gradient_clipping=config.gradient_clipping,
            device=str(config.resources.device),
            leaf_modules=self.model.leaf_modules,
            offload=config.resources,
        )
        if config.precision == "fp8":
            if not isinstance(self.model, Decoder):
                raise ConfigError("precision: fp8 is for models of nanodag's own decoder; set it to bf16.")
            self.model.functions.linear = fp8_linear(engine.device)
        torch.manual_seed(int(config.seed) * 1000 + engine.rank)
        self.group = join(config.sequence_parallel, str(config.resources.device))
        self.group.check(self.model.architecture)
        self.checkpoints = Checkpoints(job.checkpoints, keep=config.keep_checkpoints)
        self.checkpoint = newest_of_all(self.checkpoints, engine)
        self.data, self.objective = Data(job, self.tokenizer_path, engine, self.group), function_at(config.objective)()
        size = size_of(job.inputs.get("model", self.tokenizer_path), self.model.architecture)
        self.num_steps = self.data.num_steps(self.checkpoint)
        self.flops_per_token = size.training_flops(config.sequence_length)
        self.matrix_flops_per_token = size.training_flops(0)
        self.peak_flops = engine.world_size * matmul_peak(engine.device.type)
        self.source, self.validation = self.data.training(), self.data.validation(size.vocabulary, self.objective)
        self.objective.begin(self)

    def score(self) -> ValidationLoss:
        """The held-out score of the current weights."""
        assert self.validation is not None
        # On CPU compiling the forward pass alone takes longer than it saves.
        with uncompiled(self.model, active=self.engine.device.type == "cpu"):
            return self.validation()

    def score_core(self, step: int, write: Callable[..., None]) -> Mapping[str, float] | None:
        """The accuracy of each of CORE's tasks, of the current weights; None once a stop was asked for."""

        def say(done: int) -> None:
            write(step, total=self.num_steps, event="phase", phase="CORE", done=done, of=len(TASKS), unit="tasks")

        with uncompiled(self.model, active=self.engine.device.type == "cpu"):
            return core_accuracies(
                self.engine,
                self.model,
                Encoding(self.tokenizer_path),
                find_files(bundle_url(self.config.core_bundle), self.job.mirror),
                limit=self.config.core_limit,
                batch_tokens=int(self.config.micro_batch_tokens),
                on_task=say,
            )

    def show_samples(self, step: int, write: Callable[..., None]) -> None:
        """Continue the config's sample prompts greedily and write what came out."""
        prompts = self.config.sample_prompts
        if not prompts:
            return
        encoding = Encoding(self.tokenizer_path)
        if self.config.is_chat:
            from nanodag.tokenizer.chat import load_renderer

            renderer = load_renderer(self.tokenizer_path)
            rows = [renderer.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        else:
            rows = [[encoding.bos_id, *encoding.encode(prompt)] for prompt in prompts]
        with uncompiled(self.model):
            outputs = greedy(self.engine, rows, stop_ids=encoding.special_ids, device=self.engine.device)
        for prompt, output in zip(prompts, outputs, strict=True):
            text = encoding.decode(output)
            write(step, total=self.num_steps, event="sample", prompt=prompt, text=text)
            log.info("Step %d sample: %s|%s", step, prompt, text)

    def export(self, folder: Path, *, whole: bool = False) -> None:
        """Write the current weights as a Hugging Face directory; every rank must call it. whole: the merged model, also
        where the stage leaves adapters alone."""
        weights = self.engine.full_state_dict()
        if self.engine.rank == 0:
            optimizer = self.config.optimizer
            scale, source = optimizer.lora_alpha / max(optimizer.lora_rank, 1), self.job.inputs.get("model")
            tensors = dict(merged(weights.items(), scale=scale))
            save(folder, tensors, tokenizer=self.tokenizer_path, source=source, model=self.model)
            if self.config.lora_base == "whole":  # else they are of no base that anybody has
                save_adapter(folder / ADAPTER, weights, alpha=optimizer.lora_alpha, dtype=torch.float32)
            if optimizer.lora_save == "adapter" and not whole:
                leave_adapter(folder, base=self.job.context.get("bases", {}).get("model", {}))
        self.engine.barrier()


def with_extension(job: Job) -> Job:
    """The job, with the model that it goes on from declared for the positions that its stage says."""
    if not job.config.extends_to:
        return job
    options = {"positions": job.config.extends_to, "by": job.config.shape.extend_by}
    model = extended(job.inputs["model"], job.workspace / "extended", **options)
    return replace(job, inputs={**job.inputs, "model": model})


def _model(job: Job, tokenizer_path: Path) -> CausalModel:
    config = job.config
    options = {"compiled": config.compile is True, "activation_checkpointing": config.activation_checkpointing is True}
    if "model" in job.inputs:
        scores = config.packing.get("scores_ends", False)
        model = load(job.inputs["model"], is_deferred=config.zero_stage == 3, scores=scores, **options)
        if rank := config.optimizer.lora_rank:
            alpha, seed = config.optimizer.lora_alpha, int(config.seed)
            add_lora(model, rank=rank, alpha=alpha, seed=seed, in_four_bits=config.lora_base == "nf4")
        if isinstance(model, ScalarHead):  # at 0 it would pass no gradient to adapters
            model.score.requires_grad_(True)
            model.step_separator = config.packing.get("step_separator", "")
        return model
    model = Decoder(architecture_of(job, tokenizer_path), **options)
    initialise(model, int(config.seed))
    return model


def architecture_of(job: Job, tokenizer_path: Path) -> Architecture:
    """Architecture of the model that a stage trains: its input's, else by its config."""
    if "model" in job.inputs:
        return read_checkpoint(job.inputs["model"]).architecture
    config = job.config
    return qwen3_architecture(
        config.shape.as_shape(),
        vocabulary=Encoding(tokenizer_path).size,
        rope_theta=config.shape.rope_theta,
        max_positions=config.shape.max_positions,
    )


class Data:
    """The stage's sources as token batches for this rank."""

    def __init__(self, job: Job, tokenizer_path: Path, engine: TrainEngine, group: SequenceGroup) -> None:
        config: SupervisedStage = job.config
        self._config, self._engine, self._job, self._group = config, engine, job, group
        micro = int(config.micro_batch_tokens)
        self._rows = micro // config.sequence_length
        self.micro_batches = int(config.batch_tokens) // (micro * group.num_groups)
        self._tokenizer_path = tokenizer_path
        self._arguments: dict[str, Any] = {
            "tokenizer_path": tokenizer_path,
            "kind": config.record_kind,
            "batch_rows": self._rows,
            "sequence_length": config.sequence_length,
            "seed": int(config.seed),
            "rank": group.number,
            "world": group.num_groups,
            "mirror": job.mirror,
            "tokenising_threads": tokenising_threads(
                engine.device.type, cores=usable_cores(), ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            ),
            **config.packing,
        }

    def training(self) -> TokenBatches:
        """The stage's batches. By num_epochs they end; by horizon_tokens a mixture by epochs begins again, in another
        order. The next step's are made while one trains."""
        sources = self._config.data
        passes: dict[str, Any] = {"num_epochs": self._config.passes}
        if self._config.horizon_tokens:
            passes = {"repeat": mixes_by_epochs(sources)}
        return TokenBatches(sources, prefetch=self.micro_batches, **passes, **self._arguments)

    def num_steps(self, checkpoint: Path | None) -> int:
        """Steps of the stage: horizon_tokens, else num_epochs; at most max_steps.

        Passes are counted by packing all their data once; a restarted stage reads the number from its checkpoint
        instead. Raises ConfigError for num_epochs of a mixture by weights, which has no pass.
        """
        config = self._config
        if config.horizon_tokens:
            num_steps = math.ceil(int(config.horizon_tokens) / int(config.batch_tokens))
        elif checkpoint is not None:
            return planned_steps(checkpoint)
        else:
            num_steps = self._steps_of_passes()
        return min(num_steps, config.max_steps) if config.max_steps else num_steps

    def _steps_of_passes(self) -> int:
        sources = self._config.data
        if not mixes_by_epochs(sources):
            raise ConfigError(
                f"{self._job.name}.num_epochs: {self._config.passes} passes over a mixture by weights have no "
                "meaning, as it has no end. Set horizon_tokens, or leave out the weights."
            )
        batches = TokenBatches(sources, num_epochs=self._config.passes, **self._arguments)
        counts = batches.count()
        batches.close()
        # No rank begins a stretch before all have ended the one before: the longest of each decides.
        num_stretches = int(self._engine.highest(len(counts)))
        steps = [-(-count // self.micro_batches) for count in counts] + [0] * (num_stretches - len(counts))
        return int(sum(self._engine.highest(number) for number in steps))

    def validation(self, vocabulary: int, objective: Objective) -> Callable[[], ValidationLoss] | None:
        """The score of the current weights on the held-out part, the same at every call; None without any. That is
        conversations, or documents where there are no others."""
        config = self._config
        sources = _evenly([source for source in config.data if source.held_out])
        if config.is_chat:
            # One mean over both would be that of the documents: they have a label at every token.
            chats = [s for s in sources if kind_of(s.adapter, s.url, "chat") == "conversation"]
            sources = chats or sources
        if not sources or not config.validation_tokens:
            log.warning("No source has held_out: this stage is not validated.")
            return None
        encoding, engine = Encoding(self._tokenizer_path), self._engine
        rank, world, pad_id = self._group.number, self._group.num_groups, encoding.pad_id
        is_text = isinstance(objective, NextToken)
        if is_text:
            num_rows = math.ceil(config.validation_tokens / config.sequence_length)
            once = partial(self._once, sources, "held_out", rank=0, world=1, batch_rows=1, seed=0)
            recipe = {**self._recipe(sources), "num_rows": num_rows}
            rows = held_out_rows(self._job.held_out, recipe, lambda: islice(once(), num_rows))
            batches = rows.batches(rank=rank, world=world, batch_rows=self._rows, pad_id=pad_id)
        else:
            num_batches = math.ceil(config.validation_tokens / (self._rows * config.sequence_length))
            batches = list(islice(self._once(sources, "held_out", rank=0, world=1, seed=0), num_batches))[rank::world]
        if not (most := int(engine.highest(len(batches)))):
            shares = ", ".join(f"{source.held_out} of {source.url}" for source in sources)
            raise ConfigError(
                f"{self._job.name}.data: held_out holds out no row to validate on: {shares}. Raise the share, or set "
                "validation_tokens to 0."
            )
        batches += [self._empty] * (most - len(batches))
        if not is_text:
            return partial(score_objective, engine, objective, batches)
        token_bytes = torch.zeros(vocabulary, dtype=torch.int32, device=engine.device)
        encoding_bytes = torch.from_numpy(encoding.token_bytes)[:vocabulary]
        token_bytes[: len(encoding_bytes)] = encoding_bytes
        return partial(score_text, engine, token_bytes, batches, self._group)

    def reference(self) -> dict[int, tuple[float, float]]:
        """Log-probabilities of both answers of every pair, by its key, of the weights that the engine holds: those of a
        stage that begins so with these data, if they are kept. Every rank must call it."""
        from nanodag.train.preference import scored

        config, engine = self._config, self._engine
        model = self._job.inputs["model"]  # the same weights are another model by another config.json
        weights = {path.name: file_sha256(path) for path in (model / "config.json", *weight_files(model))}
        arguments = {name: self._arguments[name] for name in ("batch_rows", "world", "too_long")}
        recipe = {**self._recipe(config.data), **arguments, "weights": weights, "precision": config.precision}
        recipe |= {"lora_base": config.lora_base} if config.lora_base != "whole" else {}

        def make() -> dict[int, tuple[float, float]]:
            log.info("Scoring all pairs with the weights that the stage begins with.")
            held_out = [source for source in config.data if source.held_out]
            parts = [self._once(config.data, "train"), *([self._once(held_out, "held_out")] if held_out else [])]
            return scored(engine, chain.from_iterable(parts), self._empty)

        return kept_table(self._job.held_out, recipe, make, engine)

    @property
    def _empty(self) -> Batch:
        pad_id = Encoding(self._tokenizer_path).pad_id
        return make_batch([], num_rows=self._rows, row_length=self._config.sequence_length, pad_id=pad_id)

    def _once(self, sources: Sequence[SourceConfig], part: Part, **arguments: Any) -> Iterator[Batch]:
        """Batches of one pass over a part of these sources, in their order. arguments: other ones of TokenBatches."""
        own = {**self._arguments, **arguments}
        batches = TokenBatches(_evenly(sources), part=part, once=True, shuffle=False, **own)
        try:
            yield from batches
        finally:  # whoever wants a few is through before the end
            batches.close()

    def _recipe(self, sources: Sequence[SourceConfig]) -> dict[str, Any]:
        """Everything that decides which tokens the data become, JSON values."""
        config, mirror = self._config, self._job.mirror
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *SETTINGS_FILES)
        tokenizer_files = [self._tokenizer_path / name for name in names]
        adapters = {source.adapter for source in sources if ":" in source.adapter}
        return {
            "sources": [[open_source(s.url, mirror).identity(), s.model_dump(exclude={"url"})] for s in sources],
            "adapters": {name: file_sha256(required_file(name.partition(":")[0], name)) for name in adapters},
            # what decides how text and conversations become tokens
            "tokenizer": {path.name: file_sha256(path) for path in tokenizer_files if path.exists()},
            "code_version": find_kind(config.kind).code_version,
            **{name: self._arguments.get(name, "") for name in ("kind", "sequence_length", "too_long")},
        }


def _evenly(sources: Sequence[SourceConfig]) -> list[SourceConfig]:
    """The sources without weights and passes: each is read once."""
    return [source.model_copy(update={"weight": None, "epochs": None}) for source in sources]
