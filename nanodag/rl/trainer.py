"""One rank of the RL trainer: `python -m nanodag.rl.trainer job.json`, started by the controller.

It does what the controller asks for, one thing at a time, all ranks the same:

    load    take weights and optimizer state from a checkpoint folder, or begin
    train   one step on a file of rollouts: advantages by group, packing, one or more updates
    export  write the weights as a Hugging Face directory, or those that were broadcast last
    layout, open_group, broadcast  the distributed weight sync (nanodag.rl.broadcast)
    save    write this rank's share of a checkpoint
    end     leave

It draws no random numbers, so a checkpoint holds none of its own. Not covered: dropout (RL policies have none),
offload, LoRA, a reference model spread over ranks (each holds all of it).
"""

import logging
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanodag.config.schema import OptimizerConfig, RLStage
from nanodag.errors import TrainingDiverged
from nanodag.model.decoder import Layer
from nanodag.rl import entries
from nanodag.rl.broadcast import Broadcaster
from nanodag.rl.children import ignore_stop_signals
from nanodag.rl.export import write_model
from nanodag.rl.link import ControllerLink
from nanodag.rl.losses.aggregation import Totals
from nanodag.rl.metrics import Sums
from nanodag.rl.packing import pack
from nanodag.rl.policy import Row, load_policy, to_row
from nanodag.rl.reference import Reference
from nanodag.rl.rollout import Rollout, groups_of, read_rollouts
from nanodag.rl.update import Objective, Scored
from nanodag.sampler.fingerprints import Fingerprints
from nanodag.train.engine import DTYPES, Engine, leave
from nanodag.train.peak import matmul_peak
from nanodag.worker import Job, read_job

log = logging.getLogger(__name__)

LOSSES_KEPT = 10
PREFIX = "decoder."  # of Policy's parameters, before the names that transformers gives


class Trainer:
    """The policy of one stage on this rank, its reference where there is a KL term, and its updates."""

    def __init__(self, config: RLStage, model_path: Path, *, device: str) -> None:
        self.config = config
        self.model_path = model_path
        self._objective = Objective(config)
        self._advantage = entries.load("advantage", config.advantage)
        self.engine = Engine(
            load_policy(
                model_path,
                temperature=config.temperature,
                compiled=config.compile,
                checkpointing=config.activation_checkpointing,
            ),
            optimizer=OptimizerConfig(
                name="adamw",
                learning_rate=config.learning_rate,
                betas=config.betas,
                weight_decay=config.weight_decay,
            ),
            zero_stage=config.zero_stage,
            precision=config.precision,
            gradient_clipping=config.gradient_clipping,
            device=device,
            leaf_modules=(Layer,),
        )
        self._reference: Reference | None = None
        if config.kl_coefficient > 0:
            self._reference = Reference(model_path, temperature=config.temperature, engine=self.engine)
        self.broadcaster = Broadcaster(
            self.engine.shares,
            rank=self.engine.rank,
            prefix=PREFIX,
            bucket_bytes=config.sync_bucket_bytes,
            timeout_s=config.sync_timeout_s,
        )
        self._peak_flops = matmul_peak(device, self.engine.dtype)
        self._num_updates = 0
        self._last_losses: deque[float] = deque(maxlen=LOSSES_KEPT)

    def train(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """One step: as many updates as the config says over these rollouts. Returns sums for metrics.trainer_metrics.

        Raises TrainingDiverged with the step and the last losses when a loss or gradient is not finite.
        """
        groups = list(groups_of(rollouts).values())
        num_updates = min(self.config.updates_per_step, len(groups))
        parts = [[r for group in part for r in group] for part in _shared_out(groups, num_updates)]
        rows = [self._rows_of(part) for part in parts]
        # One update: the weights are those at the start of the step, so old is trainer, and the ratio exactly 1.
        is_old_needed = num_updates > 1 or self.config.kl_in == "reward"
        old = self._scores(self.engine, rows) if is_old_needed else None
        reference = None if self._reference is None else self._scores(self._reference.policy, rows)
        rewards = [torch.tensor([rollout.reward for rollout in part], dtype=torch.float32) for part in parts]
        if self.config.kl_in == "reward":
            assert old is not None and reference is not None
            taken = map(self._kl_penalties, rows, old, reference, map(len, parts))
            rewards = [before - penalties for before, penalties in zip(rewards, taken, strict=True)]
        advantages = self._advantages_of(parts, rewards)
        total, norms = Sums({}, {}), []
        for number, part in enumerate(rows):
            sums, totals = Sums({}, {}), self._totals(parts[number])
            for place, row in enumerate(part):
                logprobs, entropies = self.engine(row)
                scored = Scored(
                    row=row,
                    trainer_logprobs=logprobs,
                    entropies=entropies,
                    old_logprobs=logprobs.detach() if old is None or num_updates == 1 else old[number][place],
                    advantages=advantages[number][row.rollouts][row.sequence_ids],
                    reference_logprobs=None if reference is None else reference[number][place],
                )
                loss, share = self._objective(scored, totals)
                sums.add(share)
                self.engine.backward(loss, last=place == len(part) - 1)
            norms.append(self._update(step, sums.summed["loss"]))
            total.add(sums)
        self._refresh_reference(self._num_updates - num_updates)
        return {
            "sums": asdict(total),
            "num_updates": num_updates,
            "gradient_norm": max(norms),
            "learning_rate": self._learning_rate(),
            "peak_flops": self._peak_flops,
            "computed_tokens": sum(row.token_ids.numel() for part in rows for row in part),
        }

    def export(self, folder: Path, *, fingerprint: bool = False, kept: bool = False) -> dict[str, str]:
        """Write the weights as a Hugging Face directory; every rank must call it.

        fingerprint: rank 0 returns the fingerprint of each tensor that the sampler must then hold. kept: the weights
        that were broadcast last.
        """
        found = self._fingerprints()
        own = ((name.removeprefix(PREFIX), tensor) for name, tensor in self.engine.weights())
        write_model(
            self.broadcaster.kept() if kept else own,
            folder,
            source=self.model_path,
            is_writer=self.engine.rank == 0,
            dtype=self.engine.dtype,
            fingerprints=found if fingerprint else None,
        )
        return found.all()

    def broadcast(self, *, fingerprint: bool) -> dict[str, Any]:
        """Give the samplers of the open group the weights; every rank must call it. fingerprint: as for `export`."""
        found = self._fingerprints()
        failure = self.broadcaster.send(found if fingerprint and self.engine.rank == 0 else None)
        return {"failure": failure, "fingerprints": found.all()}

    def save(self, folder: Path) -> None:
        """Write this rank's share of a checkpoint."""
        self.engine.save(folder)
        if self._reference is not None and self.config.reference_every:
            self._reference.save(folder)

    def load(self, folder: Path, *, num_updates: int) -> None:
        """Take back what `save` wrote. num_updates: done so far, for the warm-up."""
        self.engine.load(folder)
        if self._reference is not None and self.config.reference_every:
            self._reference.load(folder)
        self._num_updates = num_updates

    def _fingerprints(self) -> Fingerprints:
        """For the tensors that the sampler must then hold, as it will fingerprint them."""
        sampler = self.config.sampler
        is_sglang = sampler.engine == "sglang"
        return Fingerprints("sglang", DTYPES[sampler.precision]) if is_sglang else Fingerprints("checkpoint")

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far."""
        return self._num_updates

    def _update(self, step: int, loss: float) -> float:
        self._last_losses.append(loss)
        try:
            norm = self.engine.step(learning_rate=self._learning_rate())
        except TrainingDiverged as error:
            raise TrainingDiverged(
                f"{error} RL step {step}, this rank's last losses {list(self._last_losses)}. Lower learning_rate or "
                "gradient_clipping; the last checkpoint is from before."
            ) from error
        self._num_updates += 1
        return norm

    def _refresh_reference(self, updates_before: int) -> None:
        """After every `reference_every` updates, at the end of the step in which they were done."""
        every = self.config.reference_every
        if self._reference is not None and every and self._num_updates // every > updates_before // every:
            self._reference.refresh()

    def _learning_rate(self) -> float:
        warmup = self.config.warmup_steps * self.config.updates_per_step
        return self.config.learning_rate * min(1.0, (self._num_updates + 1) / (warmup + 1))

    def _advantages_of(self, parts: Sequence[Sequence[Rollout]], rewards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Advantages over all rollouts of the step, for each part of it."""
        rollouts = [rollout for part in parts for rollout in part]
        number = {group_id: index for index, group_id in enumerate(groups_of(rollouts))}
        group_ids = torch.tensor([number[rollout.group_id] for rollout in rollouts])
        num_tokens = torch.tensor([_num_trained(rollout) for rollout in rollouts])
        advantages = self._advantage(torch.cat(list(rewards)), group_ids, num_tokens)
        return advantages.to(self.engine.device).split([len(part) for part in parts])

    def _kl_penalties(self, rows: list[Row], old: list[Tensor], reference: list[Tensor], size: int) -> Tensor:
        """What KL takes off the reward of each rollout of a part, (size,) float32: each rank has its rows, and all need
        the same rewards."""
        found = torch.zeros(size, dtype=torch.float64)
        for row, old_logprobs, reference_logprobs in zip(rows, old, reference, strict=True):
            found += self._objective.kl_of_rollouts(row, old_logprobs, reference_logprobs, size).cpu()
        return self.config.kl_coefficient * torch.tensor(self.engine.summed(*found.tolist()), dtype=torch.float32)

    def _rows_of(self, part: Sequence[Rollout]) -> list[Row]:
        engine = self.engine
        ranks = pack(part, budget_tokens=self.config.micro_batch_tokens, num_ranks=engine.world_size)
        return [to_row(batch, engine.device) for batch in ranks[engine.rank]]

    def _totals(self, part: Sequence[Rollout]) -> Totals:
        trained = [_num_trained(rollout) for rollout in part]
        return Totals(
            num_tokens=sum(trained), num_sequences=sum(n > 0 for n in trained), max_tokens=self.config.max_new_tokens
        )

    @torch.no_grad()
    def _scores(self, model: Any, rows: Sequence[Sequence[Row]]) -> list[list[Tensor]]:
        return [[model(row)[0] for row in part] for part in rows]


def _num_trained(rollout: Rollout) -> int:
    return sum(sum(span.mask) for span in rollout.spans)


def _shared_out(groups: list[list[Rollout]], num_parts: int) -> list[list[list[Rollout]]]:
    """Groups in order, in num_parts parts whose sizes differ by at most one."""
    bounds = [len(groups) * number // num_parts for number in range(num_parts + 1)]
    return [groups[start:end] for start, end in pairwise(bounds)]


def _carry_out(trainer: Trainer, message: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    reply: dict[str, Any] = {}
    match message["do"]:
        case "load":
            trainer.load(Path(message["folder"]), num_updates=message["num_updates"])
        case "train":
            reply = trainer.train(message["step"], list(read_rollouts(Path(message["rollouts"]))))
        case "export":
            options = {name: message.get(name, False) for name in ("fingerprint", "kept")}
            reply = {"fingerprints": trainer.export(Path(message["folder"]), **options)}
        case "layout":
            reply = {"buckets": trainer.broadcaster.layout()}
        case "open_group":
            reply = {"port": trainer.broadcaster.open(message["name"], message["size"])}
        case "broadcast":
            reply = trainer.broadcast(fingerprint=message["fingerprint"])
        case "save":
            trainer.save(Path(message["folder"]))
            reply = {"num_updates": trainer.num_updates}
    return {**reply, "seconds": time.monotonic() - began}


def _serve(job: Job, link: ControllerLink) -> None:
    trainer = Trainer(job.config, job.inputs["model"], device=job.config.resources.device)
    link.reply({"ready": True})
    while (message := link.next())["do"] != "end":
        link.reply(_carry_out(trainer, message))
    trainer.broadcaster.close()
    trainer.engine.barrier()


def main() -> None:
    """Serve the controller until it says `end`; any error goes to it, and ends this rank."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
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
