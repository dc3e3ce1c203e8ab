"""One rank of the RL trainer: `python -m nanodag.rl.trainer.trainer job.json`, started by the controller.

It does what the controller asks for, one thing at a time, all ranks the same:

    load    take weights and optimizer state from a checkpoint folder, or begin
    train   one step on a file of rollouts: advantages by group or critic, packing, one or more updates
    export  write the weights as a Hugging Face directory, or those that were given last; export_adapter: adapters alone
    layout, open_group, join_group, leave_group, broadcast, share  give weights to the samplers
            (nanodag.rl.trainer.weight_sender)
    save    write this rank's share of a checkpoint
    lend, take_back  the device's memory to the samplers, and back (nanodag.train.lent_memory)
    end     leave

It draws no random numbers, so a checkpoint holds none of its own. Not covered: dropout (RL policies have none).
"""

import logging
import os
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.config.kinds.rl import RLStage
from nanodag.errors import TrainingDiverged
from nanodag.inference.number_formats import DTYPES
from nanodag.model.adapter_folder import leave_adapter
from nanodag.model.folder import write_like
from nanodag.model.lora import ADAPTER, BETWEEN, add_lora, merged, save_adapter
from nanodag.model.transformers_model import TransformersModel, replay_routes
from nanodag.rl.losses import Totals
from nanodag.rl.rollouts.rollout import Rollout, groups_of, read_rollouts
from nanodag.rl.trainer.credit import Credit, folder_beside
from nanodag.rl.trainer.critic import Critic
from nanodag.rl.trainer.link import ControllerLink
from nanodag.rl.trainer.policy import ByRow, DeviceRow, Policy, Reference, Rows, engine_of, to_row, trained_decoder
from nanodag.rl.trainer.rows import pack
from nanodag.rl.trainer.update import DeviceSums, PolicyObjective, Scored, Scores, write_scores
from nanodag.rl.trainer.weight_sender import WeightGiver
from nanodag.sampler.device import give_back, held_memory, traced
from nanodag.sampler.fingerprints import Fingerprints, fingerprints_of
from nanodag.train.deepspeed_engine import TrainEngine, leave
from nanodag.train.learning_rate import policy_rate
from nanodag.train.lent_memory import LentMemory
from nanodag.train.peak import matmul_peak
from nanodag.train.sequence_parallel import join
from nanodag.worker.children import ignore_stop_signals
from nanodag.worker.job import Job, logs, read_job

log = logging.getLogger(__name__)

LOSSES_KEPT = 10
PREFIX = "decoder."  # of Policy's parameters, before the names that transformers gives


class Trainer:
    """The policy of one stage on this rank, its reference where the KL to one is wanted, and its updates. beside: other
    inputs of the stage, where a critic or teacher is one."""

    def __init__(
        self, config: RLStage, model_path: Path, *, device: str, beside: Mapping[str, Path] | None = None
    ) -> None:
        self.config = config
        self.model_path = model_path
        self._objective = PolicyObjective(config)
        self._group = join(config.optimizer.sequence_parallel, device)
        self._decoder = trained_decoder(model_path, config)
        if config.rollout.router_replay:
            replay_routes(self._decoder)
        policy = Policy(self._decoder, temperature=config.rollout.temperature, group=self._group)
        if config.optimizer.lora_rank:
            add_lora(policy, rank=config.optimizer.lora_rank, alpha=config.optimizer.lora_alpha, seed=int(config.seed))
        self.engine = engine_of(
            policy, policy.decoder, config, learning_rate=config.optimizer.learning_rate, device=device
        )
        inputs = {**(beside or {}), "model": model_path}
        self._reference: Reference | None = None
        if config.algorithm.has_reference:
            folder, temperature = folder_beside(config, "reference", inputs), config.rollout.temperature
            self._reference = Reference(folder, temperature=temperature, engine=self.engine, group=self._group)
        self._credit = Credit(config, inputs, engine=self.engine, group=self._group, device=device)
        self._lora_scale = config.optimizer.lora_alpha / max(config.optimizer.lora_rank, 1)
        self.giver = WeightGiver(
            self.engine.shares,
            config.weights,
            rank=self.engine.rank,
            prefix=PREFIX,
            make_fingerprints=self._fingerprints,
            lora_scale=self._lora_scale,
        )
        self._peak_flops = matmul_peak(device)
        self._last_losses: deque[Tensor] = deque(maxlen=LOSSES_KEPT)
        self.last_scores: list[tuple[list[Rollout], list[Scores]]] = []  # of the last step, for write_scores

    def train(self, step: int, rollouts: Sequence[Rollout], *, num_steps: int | None = None) -> dict[str, Any]:
        """One step: as many updates as the config says over these rollouts. Returns sums for metrics.trainer_metrics.
        num_steps: of the stage, where the config leaves them to the data. Raises TrainingDiverged with the step and the
        last losses when a loss or gradient is not finite."""
        self.giver.release()
        groups = list(groups_of(rollout for rollout in rollouts if rollout.num_trained or not rollout.role).values())
        num_parts = min(self.config.optimizer.updates_per_step, len(groups))
        bounds = [len(groups) * number // num_parts for number in range(num_parts + 1)]  # sizes differ by at most one
        parts = [[r for group in groups[start:end] for r in group] for start, end in pairwise(bounds)]
        rows = [self._rows_of(part) for part in parts]
        # One update: the weights are those at the start of the step, so old is trainer, and the ratio exactly 1.
        epochs = self.config.optimizer.epochs_per_step
        passes = [number for _ in range(epochs) for number in range(num_parts)]
        is_old_needed = len(passes) > 1 or self.config.algorithm.kl_in == "reward"
        old = self._scores(self.engine, rows) if is_old_needed else None
        reference = None if self._reference is None else self._scores(self._reference, rows)
        teacher = self._credit.teacher_logprobs(parts, rows)
        advantages, reply = self._credit.assign(step, parts, rows, old, reference)
        is_trained = self._credit.critic is None or step > self.config.algorithm.critic.warmup_steps
        total, norms, skipped_before, rate = DeviceSums(), [], self.engine.updates.num_skipped, 0.0
        self.last_scores = [(part, []) for part in parts]
        for turn, number in enumerate(passes):
            part, sums, trained = rows[number], DeviceSums(), [rollout.num_trained for rollout in parts[number]]
            totals = Totals(
                num_tokens=sum(trained),
                num_sequences=sum(n > 0 for n in trained),
                max_tokens=self.config.rollout.max_new_tokens,
            )
            for place, row in enumerate(part):
                with torch.set_grad_enabled(is_trained):
                    logprobs, entropies = self.engine(row)
                scored = Scored(
                    row=row,
                    trainer_logprobs=logprobs,
                    entropies=entropies,
                    old_logprobs=logprobs.detach() if old is None or len(passes) == 1 else old[number][place],
                    advantages=advantages[number][place],
                    reference_logprobs=None if reference is None else reference[number][place],
                )
                if teacher is not None:
                    scored, share = self._credit.distilled(scored, teacher[number][place])
                    sums.add(share)
                if len(self.last_scores[number][1]) < len(part):  # in the first epoch
                    self.last_scores[number][1].append((row, scored.advantages, scored.old_logprobs))
                loss, share = self._objective(scored, totals)
                sums.add(share)
                if is_trained:
                    self.engine.backward(loss, last=place == len(part) - 1)
            if is_trained:
                algorithm = self.config.algorithm
                rate = policy_rate(
                    self.config.optimizer,
                    steps_done=step - 1 + turn / len(passes),
                    num_updates=self.engine.updates.num_updates,
                    num_steps=num_steps or self.config.num_steps,
                    first_step=algorithm.critic.warmup_steps if algorithm.has_critic else 0,
                )
                if (norm := self._update(step, sums.summed["loss"], rate)) is not None:
                    norms.append(norm)
            total.add(sums)
        every, done = self.config.algorithm.reference_every, self.engine.updates.num_updates
        if self._reference is not None and every and done // every > (done - len(norms)) // every:
            self._reference.model.take(self._weights({}))
        if not self._group.is_first:  # another rank counts the same rows
            total, rows, self.last_scores = DeviceSums(), [], []
        return reply | {
            "sums": total.read(),
            "num_parts": num_parts,
            "num_passes": len(passes),
            "num_updates": len(norms),
            "skipped_updates": self.engine.updates.num_skipped - skipped_before,
            "gradient_norm": max(norms, default=0.0),
            "learning_rate": rate,
            "peak_flops": self._peak_flops,
            "computed_tokens": epochs * sum(row.token_ids.numel() for part in rows for row in part),
            "scored_tokens": epochs * sum(row.targets.numel() for part in rows for row in part),
        }

    def export(self, folder: Path, *, fingerprint: bool = False, kept: bool = False) -> dict[str, str]:
        """Write the weights as a Hugging Face directory; every rank must call it. fingerprint: rank 0 returns the
        fingerprint of each tensor that the sampler must then hold. kept: the weights that were given last."""
        fingerprints = self._fingerprints()
        adapters: dict[str, Tensor] = {}
        own = ((name.removeprefix(PREFIX), tensor) for name, tensor in self._weights(adapters))
        weights = self.giver.tensors(kept=True) if kept else own
        if isinstance(self._decoder, TransformersModel):  # whose checkpoints have other tensors than its classes
            whole = {name: tensor.to("cpu", copy=True) for name, tensor in weights if self.engine.rank == 0}
            weights = iter(self._decoder.checkpoint(whole).items() if whole else ())
        write_like(
            self.model_path,
            folder,
            weights,
            is_writer=self.engine.rank == 0,
            dtype=self.engine.dtype,
            on_tensor=fingerprints.add if fingerprint else None,
        )
        if self.engine.rank == 0:
            save_adapter(folder / ADAPTER, adapters, alpha=self.config.optimizer.lora_alpha, dtype=torch.float32)
        return fingerprints.all()

    def export_adapter(self, folder: Path, *, fingerprint: bool = False, kept: bool = False) -> dict[str, str]:
        """Write the adapters alone, in peft's format and the training precision. Arguments and result as of `export`:
        fingerprints of all merged tensors."""
        found = fingerprints_of(self.giver.tensors(merged=True)) if fingerprint else {}
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.giver.tensors(kept=kept)}
        if self.engine.rank == 0:
            temporary = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            save_adapter(temporary, tensors, alpha=self.config.optimizer.lora_alpha, dtype=self.engine.dtype)
            temporary.rename(folder)
        return found

    def save(self, folder: Path) -> None:
        """Write this rank's share of a checkpoint."""
        for part in self._saved_parts():
            part.save(folder)

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote."""
        for part in self._saved_parts():
            part.load(folder)

    def _saved_parts(self) -> Iterator[TrainEngine | Critic | Reference]:
        yield self.engine
        if self._credit.critic is not None:
            yield self._credit.critic
        if self._reference is not None and self.config.algorithm.reference_every:
            yield self._reference

    def lend(self, what: str) -> None:
        """Give memory of the device to the samplers. what: `states` of optimizers and gradients; or `weights`, those of
        frozen models too. Until `take_back` this rank can save, and without its states alone also export and broadcast,
        and nothing else. Without `lends_states` only what torch holds and does not use is given."""
        for memory in self._lent[what] if self.config.lends_states is True else ():
            memory.lend()
        if what == "weights":
            self.giver.release()  # samplers have the last bucket by then
        give_back(self.engine.device)

    def take_back(self) -> None:
        """Have the memory again, with what was in it."""
        for memories in self._lent.values():
            for memory in memories:
                memory.take_back()

    @property
    def _lent(self) -> dict[str, list[LentMemory]]:
        critic = self._credit.critic
        engines = [self.engine] if critic is None else [self.engine, critic.engine]
        frozen = [model for model in (self._reference, self._credit.teacher) if isinstance(model, Reference)]
        return {
            "states": [engine.lent_states for engine in engines],
            "weights": [engine.lent_weights for engine in engines] + [model.lent for model in frozen],
        }

    def _fingerprints(self) -> Fingerprints:
        """Fingerprints for the tensors that the sampler must then hold, as it will compute them."""
        sampler = self.config.sampler
        if sampler.engine != "sglang":
            return Fingerprints("checkpoint")
        return Fingerprints("sglang", getattr(torch, DTYPES[sampler.precision]))

    def _weights(self, adapters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, adapters merged, as `Engine.weights` yields them; adapters: gets these as they are."""

        def seen() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.engine.weights():
                if BETWEEN in name and not name.endswith("original"):
                    adapters[name.removeprefix(PREFIX)] = tensor.to("cpu", copy=True)
                yield name, tensor

        return merged(seen(), scale=self._lora_scale)

    def _update(self, step: int, loss: Tensor, rate: float) -> float | None:
        """The gradient's norm; None for an update that was skipped."""
        self._last_losses.append(loss)
        skipped = self.engine.updates.num_skipped
        try:
            norm = self.engine.step(learning_rate=rate)
        except TrainingDiverged as error:
            losses = [float(last_loss) for last_loss in self._last_losses]
            raise TrainingDiverged(
                f"{error} RL step {step}, this rank's last losses {losses}. Lower learning_rate or "
                "gradient_clipping; the last checkpoint is from before."
            ) from error
        if self.engine.updates.num_skipped > skipped:
            log.warning("RL step %d: an update was skipped, its gradient's norm was %g", step, norm)
            return None
        return norm

    def _rows_of(self, part: Sequence[Rollout]) -> list[DeviceRow]:
        group, budget = self._group, int(self.config.optimizer.micro_batch_tokens)
        shares, replays = not isinstance(self._decoder, TransformersModel), self.config.rollout.router_replay
        ranks = {"num_ranks": group.num_groups, "rank": group.number}
        batches = pack(part, budget_tokens=budget, shares_prompts=shares, replays_routes=replays, **ranks)
        return [to_row(batch, self.engine.device) for batch in batches]

    @torch.no_grad()
    def _scores(self, model: Any, rows: Rows) -> ByRow:
        return [[model(row)[0] for row in part] for part in rows]


def _execute(trainer: Trainer, message: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    reply: dict[str, Any] = {}
    match message["do"]:
        case "load" | "save" as method:
            getattr(trainer, method)(Path(message["folder"]))
            reply = {"num_updates": trainer.engine.updates.num_updates}
        case "train":
            path = Path(message["rollouts"])
            trace = Path(message["profile"], f"trainer-{trainer.engine.rank}.trace.json.gz")
            with traced(trace) if message["profile"] else nullcontext():
                reply = trainer.train(message["step"], list(read_rollouts(path)), num_steps=message["num_steps"])
            write_scores(path.with_suffix(f".scores-{trainer.engine.rank}.jsonl"), trainer.last_scores)
            reply["peak_bytes"] = held_memory(trainer.engine.device)["peak_bytes"]
        case "export" | "export_adapter" as method:
            options = {name: message.get(name, False) for name in ("fingerprint", "kept")}
            reply = {"fingerprints": getattr(trainer, method)(Path(message["folder"]), **options)}
            if "adapter_of" in message and trainer.engine.rank == 0:
                leave_adapter(Path(message["folder"]), base=message["adapter_of"])
        case "layout" | "open_group" | "join_group" | "leave_group" | "broadcast" | "share" as method:
            reply = getattr(trainer.giver, method)(**{name: message[name] for name in message if name != "do"})
        case "lend":
            trainer.lend(message["what"])
            reply = {"bytes": held_memory(trainer.engine.device)["bytes"]}
        case "take_back":
            trainer.take_back()
    return {**reply, "seconds": time.monotonic() - began}


def _serve(job: Job, link: ControllerLink) -> None:
    device = job.config.resources.device
    trainer = Trainer(job.config, job.inputs["model"], device=device, beside=job.inputs)
    if job.config.placement == "shared":
        for what in ("states", "weights"):
            trainer.lend(what)
    link.reply({"ready": True})
    while (message := link.next())["do"] != "end":
        link.reply(_execute(trainer, message))
    trainer.giver.close()
    trainer.engine.barrier()


def main() -> None:
    """Serve the controller until it says `end`; any error goes to it, and ends this rank."""
    logs.set_up()
    ignore_stop_signals()
    # DeepSpeed calls collectives by their names of torch 2.12, several times a step.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed.* is deprecated", category=FutureWarning)
    job = read_job(Path(sys.argv[1]))
    link = ControllerLink(int(os.environ.get("RANK", "0")))
    try:
        _serve(job, link)
    except Exception as error:
        log.exception("this rank failed")
        link.fail(error)
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for ranks that wait for this one
    leave()


if __name__ == "__main__":
    main()
