"""A few steps of a tiny model under many engines: `python -m tests.train.ranks OUT CASES`, plainly or by torchrun.

Every case trains on the same tokens, dealt out to ranks and micro-batches. Rank 0 writes what came out as JSON.
"""

import gc
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from nanodag.config.dial import Shape  # noqa: E402
from nanodag.config.rl_sections import WeightsSection  # noqa: E402
from nanodag.config.stage_base import Resources  # noqa: E402
from nanodag.config.supervised import OptimizerConfig  # noqa: E402
from nanodag.errors import TrainingDiverged  # noqa: E402
from nanodag.model.build import initialise, qwen3_architecture  # noqa: E402
from nanodag.model.decoder import Decoder, Layer  # noqa: E402
from nanodag.model.folder import load  # noqa: E402
from nanodag.model.lora import add_lora, merged  # noqa: E402
from nanodag.rl.trainer.weight_sender import KEPT, NOW, WeightGiver  # noqa: E402
from nanodag.sampler.fingerprints import Fingerprints  # noqa: E402
from nanodag.train.deepspeed_engine import FrozenModel, TrainEngine, leave  # noqa: E402

ROWS, LENGTH, VOCABULARY, STEPS = 8, 12, 61, 4
SHAPE = Shape(depth=2, width=32, num_heads=2, num_kv_heads=1, head_width=16, mlp_width=64, tied_embeddings=True)


def engine_of(case: dict[str, Any]) -> TrainEngine:
    model = load(Path(case["deferred"]), is_deferred=True) if "deferred" in case else first_model(bias="bias" in case)
    if "lora" in case:
        add_lora(model, rank=4, alpha=8.0, seed=1)
    return TrainEngine(
        model,
        optimizer=OptimizerConfig(name=case.get("optimizer", "muon"), weight_decay=0.1),
        zero_stage=case["stage"],
        precision=case.get("precision", "fp32"),
        gradient_clipping=0.5,
        leaf_modules=(Layer,),
        offload=Resources(**{name: "cpu" for name in case.get("offload", [])}),
    )


def first_model(*, bias: bool = False) -> Decoder:
    of = qwen3_architecture(SHAPE, vocabulary=VOCABULARY, rope_theta=10_000.0, max_positions=LENGTH)
    model = Decoder(replace(of, qkv_bias=bias, output_bias=bias))
    initialise(model, 0)
    return model


def asked(path: Path, engine: TrainEngine) -> list[float]:
    """The loss of a frozen model beside the engine: as it was read, with doubled weights, and with weights that were
    saved as shares and taken again."""
    model = load(path, is_deferred=engine.zero_stage == 3)
    frozen = FrozenModel(model, beside=engine, leaf_modules=(Layer,))
    tokens, targets = rows_of(0)
    places = torch.arange(LENGTH).expand(ROWS, -1)

    def loss() -> float:
        with torch.no_grad():
            return float(frozen(tokens, places, torch.zeros_like(tokens), targets))

    losses = [loss()]
    kept = {name: share.clone() for name, share in frozen.shares.items()}
    whole = {name: tensor.clone() for name, tensor in load(path).named_parameters()}
    frozen.take((name, 2 * tensor) for name, tensor in whole.items())
    losses.append(loss())
    shares = {name: gathered(share, engine) for name, share in kept.items()}
    frozen.take(shares.items())
    return [*losses, loss()]


def gathered(share: torch.Tensor, engine: TrainEngine) -> torch.Tensor:
    """Shares of all ranks behind one another; one rank's where every rank has all."""
    if engine.zero_stage < 3 or engine.world_size == 1:
        return share
    parts = [torch.empty_like(share) for _ in range(engine.world_size)]
    torch.distributed.all_gather(parts, share)
    return torch.cat(parts)


def rows_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    for row in range(ROWS):
        targets[row, : row % 5] = -100
    return tokens[:, :-1], targets


def step_on(engine: TrainEngine, step: int, micro_rows: int, *, poison: bool = False) -> tuple[float, float]:
    """One step on all rows, this rank's in micro-batches of micro_rows; loss a token and gradient norm."""
    tokens, targets = rows_of(step)
    count = int((targets >= 0).sum())
    mine = slice(engine.rank, ROWS, engine.world_size)
    parts = list(zip(tokens[mine].split(micro_rows), targets[mine].split(micro_rows), strict=True))
    total = 0.0
    for index, (ids, labels) in enumerate(parts):
        positions = torch.arange(LENGTH).expand(len(ids), -1)
        loss = engine(ids, positions, torch.zeros_like(ids), labels)
        engine.backward(loss / count * (float("nan") if poison else 1.0), last=index == len(parts) - 1)
        total += loss.item()
    norm = engine.step(learning_rate=0.01, matrix_lr=0.02)
    return engine.summed(total)[0] / count, norm


def run(case: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(case)
    first = 0
    if "load" in case:
        engine.load(Path(case["load"]))
        first = case["first"]
    losses, norms = [], []
    for step in range(first, case.get("steps", STEPS)):
        loss, norm = step_on(engine, step, case.get("micro_rows", 2))
        losses.append(loss)
        norms.append(norm)
    if "save" in case:
        Path(case["save"]).mkdir(parents=True, exist_ok=True)
        engine.barrier()
        engine.save(Path(case["save"]))
        engine.barrier()
    found: dict[str, Any] = {"losses": losses, "norms": norms}
    if case.get("poison"):
        before = engine.full_state_dict()
        try:
            step_on(engine, 99, 2, poison=True)
        except TrainingDiverged as error:
            found["error"] = str(error)
        after = engine.full_state_dict()
        found["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    zero = engine._zero  # DeepSpeed's own word for what it does: `cpu_offload` at stages 1 and 2
    does = {"offload_optimizer": ("offload_optimizer", "cpu_offload"), "offload_param": ("offload_param",)}
    found["offloads"] = [name for name, words in does.items() if any(getattr(zero, word, False) for word in words)]
    if "frozen" in case:
        found["asked"] = asked(Path(case["frozen"]), engine)
    found["ways"] = ways(engine, lora="lora" in case)
    weights = engine.full_state_dict()
    found["weights"] = {name: tensor.double().flatten().tolist() for name, tensor in weights.items()}
    if not case.get("poison"):
        snapshot = engine.snapshot()
        step_on(engine, 98, 2)
        engine.restore(snapshot)
        restored = engine.full_state_dict()
        found["restored"] = all(torch.equal(weights[name], restored[name]) for name in weights)
    return found


def ways(engine: TrainEngine, *, lora: bool) -> dict[str, dict[str, str]]:
    """Fingerprints on rank 0 of what samplers get of these weights, by the way in which they get it."""
    weights = merged(engine.weights(), scale=2.0) if lora else engine.weights()
    folder, found = Fingerprints("checkpoint"), {}
    for name, tensor in weights:
        folder.add(name, tensor)
    options = {"rank": engine.rank, "prefix": "", "config": WeightsSection(sync_bucket_bytes=5000), "lora_scale": 2.0}
    buckets = WeightGiver(engine.shares, **options, make_fingerprints=lambda: Fingerprints("checkpoint"))
    buckets.begin(NOW, fingerprint=False)
    for which in (NOW, KEPT):
        brought = Fingerprints("checkpoint")
        for number in range(len(buckets._buckets)):
            if (flat := buckets._bucket(number, which)) is not None:
                for name, tensor in buckets._named(buckets._buckets[number], flat):
                    brought.add(name, tensor)
        found[which] = brought.all()
    for number in range(len(buckets._buckets)):  # to a sampler on the GPU of each rank
        reply = buckets.share(number, counts=[1] * torch.distributed.get_world_size(), fingerprint=True)
        assert len(reply["handles"]) == 1
    found["handles"] = reply["fingerprints"]
    buckets.release()
    return {"folder": folder.all(), **found}


def main() -> None:
    cases = json.loads(sys.argv[2])
    found = []
    for case in cases:
        found.append(run(case))
        gc.collect()  # an engine is a circle, with buffers of 2 GB
    if int(torch.distributed.get_rank()) == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
