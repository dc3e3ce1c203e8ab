"""The engine: every ZeRO stage, number of ranks and cut into micro-batches comes to the same weights."""

import json
from pathlib import Path

import pytest
import torch

from nanodag.config import result_config
from nanodag.config.kinds.rl import RLStage
from nanodag.config.kinds.training import SFTStage
from nanodag.config.pipeline import Pipeline
from nanodag.errors import ConfigError
from nanodag.model.build import qwen3_config
from nanodag.model.folder import load, write_folder
from tests.train import forks
from tests.train.ranks import LENGTH, ROWS, SHAPE, STEPS, VOCABULARY, first_model, rows_of


def run_ranks(out: Path, cases: list[dict], *, num_ranks: int) -> list[dict]:
    log = out.with_suffix(".log")
    forks.end(forks.start_ranks("tests.train.ranks", out, json.dumps(cases), num_ranks=num_ranks, log=log))
    assert out.exists(), log.read_text()
    return json.loads(out.read_text())


FP32 = [{"stage": stage} for stage in range(4)]
LORA = [{"stage": stage, "lora": True, "optimizer": "adamw"} for stage in (1, 3)]
LORA_TOO = [{**LORA[0], "stage": stage, "steps": 1} for stage in (0, 2)]
ADAMW = [{"stage": stage, "optimizer": "adamw"} for stage in (1, 2, 3)]
NORMUON = [{"stage": stage, "optimizer": "normuon"} for stage in range(4)]
OFFLOADED = [
    *({**case, "offload": ["offload_optimizer"]} for case in ADAMW),
    {**ADAMW[2], "offload": ["offload_optimizer", "offload_param"]},
]
BIASED = [{"stage": stage, "bias": True} for stage in (0, 3)]
BF16 = [{"stage": stage, "precision": "bf16"} for stage in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of all files; `model` in it is the model that every case begins with."""
    folder, model = tmp_path_factory.mktemp("ranks"), first_model()
    config = qwen3_config(model.architecture)
    write_folder(folder / "model", model.named_parameters(), config=config, dtype=torch.float32, beside=())
    return folder


def deferred(folder, case: dict) -> dict:
    """The case with a model that is read in shares; one of them is asked as a frozen model, too."""
    frozen = {"frozen": str(folder / "model")} if case == FP32[3] else {}
    return {**case, "deferred": str(folder / "model"), **frozen}


IN_SHARES = [FP32[3], BF16[3], LORA[1]]


@pytest.fixture(scope="module")
def one_rank(folder):
    """Stages 0 to 3 in fp32, other cuts, bf16, a save in the middle, a gradient that is not finite."""
    cases = [
        *FP32,
        *({**case, "micro_rows": rows} for case in (FP32[0], FP32[1]) for rows in (1, 8)),
        *BF16,
        {"stage": 2, "steps": 2, "save": str(folder / "one")},
        *({**case, "steps": 1, "poison": True} for case in (FP32[0], FP32[3], BF16[0], BF16[1])),
        *LORA,
        *LORA_TOO,
        {**LORA[0], "steps": 2, "save": str(folder / "lora")},
        BIASED[0],
        *(deferred(folder, case) for case in IN_SHARES),
        {**ADAMW[0], "steps": 2, "save": str(folder / "adamw")},
        NORMUON[0],
    ]
    return dict(zip(map(str, cases), run_ranks(folder / "one.json", cases, num_ranks=1), strict=True))


@pytest.fixture(scope="module")
def two_ranks(folder, one_rank):
    cases = [
        *FP32,
        {"stage": 3, "steps": 2, "save": str(folder / "two")},
        {"stage": 1, "load": str(folder / "one"), "first": 2},
        {"stage": 3, "load": str(folder / "two"), "first": 2},
        *LORA,
        *LORA_TOO,
        {**LORA[1], "load": str(folder / "lora"), "first": 2},
        BIASED[1],
        BF16[3],
        *(deferred(folder, case) for case in IN_SHARES),
        *ADAMW,
        *NORMUON,
        *OFFLOADED,
        {**OFFLOADED[-1], "load": str(folder / "adamw"), "first": 2},
    ]
    return dict(zip(map(str, cases), run_ranks(folder / "two.json", cases, num_ranks=2), strict=True))


def assert_same(found: dict, wanted: dict, *, atol: float = 2e-5, first: int = 0) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"][first:], abs=atol)
    assert found["norms"] == pytest.approx(wanted["norms"][first:], rel=1e-4)
    for name, weights in wanted["weights"].items():
        torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.tensor(weights), rtol=0, atol=atol)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_comes_to_the_weights_of_stage_0(one_rank, stage):
    assert_same(one_rank[str(FP32[stage])], one_rank[str(FP32[0])])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_come_to_the_weights_of_one(one_rank, two_ranks, stage):
    assert_same(two_ranks[str(FP32[stage])], one_rank[str(FP32[stage])])


@pytest.mark.parametrize("case", NORMUON, ids=str)
def test_normuon_on_two_ranks_comes_to_the_weights_of_one(one_rank, two_ranks, case):
    assert_same(two_ranks[str(case)], one_rank[str(NORMUON[0])])


def test_two_ranks_train_biases_as_one_does(one_rank, two_ranks):
    wanted = one_rank[str(BIASED[0])]
    assert_same(two_ranks[str(BIASED[1])], wanted)
    biases = [max(map(abs, weights)) for name, weights in wanted["weights"].items() if name.endswith("proj.bias")]
    assert len(biases) == 4 * SHAPE.depth and min(biases) > 0.01


@pytest.mark.parametrize("case", IN_SHARES, ids=str)
def test_a_model_that_is_read_in_shares_trains_to_the_same_bytes(folder, one_rank, two_ranks, case):
    for of_ranks in (one_rank, two_ranks):
        found = of_ranks[str(deferred(folder, case))]
        assert found["weights"] == of_ranks[str(case)]["weights"]
        assert found["losses"] == of_ranks[str(case)]["losses"]


def test_a_frozen_model_in_shares_is_asked_refreshed_and_taken_back_as_a_whole_one_is(folder, one_rank, two_ranks):
    tokens, targets = rows_of(0)
    expected = []
    for factor in (1.0, 2.0, 1.0):
        model = load(folder / "model")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
            places = torch.arange(LENGTH).expand(ROWS, -1)
            expected.append(float(model(tokens, places, torch.zeros_like(tokens), targets)))
    for of_ranks in (one_rank, two_ranks):
        assert of_ranks[str(deferred(folder, FP32[3]))]["asked"] == expected


def test_a_model_that_is_to_be_read_in_shares_takes_no_memory_and_says_what_is_wrong_with_its_files(folder, tmp_path):
    model = load(folder / "model", is_deferred=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    config = json.loads((folder / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY + 1}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model" / "model.safetensors")
    for is_deferred in (False, True):
        with pytest.raises(ConfigError, match=r"embed_tokens.weight .*shape \(61, 32\); config.json says \(62, 32\)"):
            load(tmp_path, is_deferred=is_deferred)


def test_best_weights_come_back_after_a_step_on_any_stage_and_number_of_ranks(one_rank, two_ranks):
    found = {
        f"{case} {ranks}": run.get("restored", True)
        for ranks, of in ((1, one_rank), (2, two_ranks))
        for case, run in of.items()
    }
    assert [case for case, restored in found.items() if not restored] == []


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_cut_into_micro_batches_does_not_show(one_rank, stage, rows):
    assert_same(one_rank[str({"stage": stage, "micro_rows": rows})], one_rank[str(FP32[stage])])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stays_close_to_fp32(one_rank, stage):
    found, wanted = one_rank[str(BF16[stage])], one_rank[str(FP32[0])]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=0.02)
    assert found["losses"][0] == pytest.approx(wanted["losses"][0], abs=0.005)


def test_a_saved_state_goes_on_under_another_stage_and_number_of_ranks(folder, one_rank, two_ranks):
    wanted = one_rank[str(FP32[0])]
    assert_same(two_ranks[str({"stage": 1, "load": str(folder / "one"), "first": 2})], wanted, first=2)
    assert_same(two_ranks[str({"stage": 3, "load": str(folder / "two"), "first": 2})], wanted, first=2)


@pytest.mark.parametrize("case", [FP32[0], FP32[3], BF16[0], BF16[1]], ids=str)
def test_a_gradient_that_is_not_finite_raises_and_changes_no_weight(one_rank, case):
    found = one_rank[str({**case, "steps": 1, "poison": True})]
    assert "finite" in found["error"] or "nan" in found["error"]
    assert found["unchanged"]


def test_one_rank_comes_to_the_weights_of_a_loop_without_deepspeed(one_rank):
    """AdamW's part and Muon's against torch's own, from the loss and gradient of the model alone."""
    from nanodag.config.supervised import OptimizerConfig
    from nanodag.model.build import initialise, qwen3_architecture
    from nanodag.model.decoder import Decoder
    from nanodag.train.optimizer import kind_of

    model = Decoder(qwen3_architecture(SHAPE, vocabulary=VOCABULARY, rope_theta=10_000.0, max_positions=LENGTH))
    initialise(model, 0)
    by_kind: dict[str, list] = {"matrix": [], "decayed": [], "plain": []}
    for name, parameter in model.named_parameters():
        by_kind[kind_of(name, parameter.shape, OptimizerConfig(name="muon"))].append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": by_kind["decayed"], "weight_decay": 0.1}, {"params": by_kind["plain"], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    muon = torch.optim.Muon(by_kind["matrix"], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True)
    losses = []
    for step in range(STEPS):
        tokens, targets = rows_of(step)
        positions = torch.arange(LENGTH).expand(ROWS, -1)
        loss = model(tokens, positions, torch.zeros_like(targets), targets) / (targets >= 0).sum()
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in (adamw, muon):
            optimizer.step()
            optimizer.zero_grad()
    # torch's Muon iterates in bfloat16, ours here in float32
    assert one_rank[str(FP32[0])]["losses"] == pytest.approx(losses, abs=5e-3)


def test_adapters_train_to_the_same_weights_at_any_stage_and_number_of_ranks_and_alone(one_rank, two_ranks, folder):
    wanted = one_rank[str(LORA[0])]
    for found in (one_rank[str(LORA[1])], two_ranks[str(LORA[0])], two_ranks[str(LORA[1])]):
        # AdamW divides a gradient by its own size: where that is near 0, its rounding moves a weight by up to half a
        # percent of a step of 0.01 (one of 128 by 2.24e-5 on a Zen 3).
        assert_same(found, wanted, atol=5e-5)
    assert_same(two_ranks[str({**LORA[1], "load": str(folder / "lora"), "first": 2})], wanted, first=2)
    begun = one_rank[str({**LORA[0], "steps": 2, "save": str(folder / "lora")})]["weights"]
    changed = {name for name in begun if begun[name] != wanted["weights"][name]}
    assert changed and all(".0.up" in name or ".0.down" in name for name in changed)


def test_samplers_get_the_same_weights_by_folder_and_in_buckets(one_rank, two_ranks):
    """Every ZeRO stage, one rank and two, with adapters and without, offloaded or not."""
    names = {name for case in (*FP32, *LORA) for name in one_rank[str(case)]["ways"]["folder"]}
    assert not any("parametrizations" in name for name in names)
    biased = one_rank[str(BIASED[0])]["ways"]["folder"].keys()
    assert len(biased - names) == 4 * SHAPE.depth
    for case, found in (*one_rank.items(), *two_ranks.items()):
        ways = found["ways"]
        expected = biased if case in map(str, BIASED) else names
        assert ways["folder"] == ways["now"] == ways["kept"] == ways["handles"] and ways["folder"].keys() == expected


@pytest.mark.parametrize("case", OFFLOADED, ids=str)
def test_offload_to_the_cpu_comes_to_the_same_losses_and_weights(two_ranks, case):
    plain = two_ranks[str({"stage": case["stage"], "optimizer": "adamw"})]
    assert_same(two_ranks[str(case)], plain, atol=1e-6)
    assert (two_ranks[str(case)]["offloads"], plain["offloads"]) == (case["offload"], [])


def test_an_offloaded_engine_goes_on_from_a_checkpoint_of_one_that_was_not(two_ranks, folder):
    found = two_ranks[str({**OFFLOADED[-1], "load": str(folder / "adamw"), "first": 2})]
    assert_same(found, two_ranks[str(ADAMW[2])], first=2, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_stage": 0}, "zero_stage 1, 2 or 3; found 0"),
        ({"optimizer": {"name": "muon"}}, "every matrix on the CPU"),
        ({"resources": {"offload_param": "cpu"}, "zero_stage": 3}, "offload_optimizer: cpu"),
        ({"resources": {"offload_optimizer": "cpu", "offload_param": "cpu"}}, "needs zero_stage 3"),
    ],
)
def test_an_offload_that_there_is_not_is_refused(values, message):
    values = {"resources": {"offload_optimizer": "cpu"}, "optimizer": {"name": "adamw"}, **values}
    with pytest.raises(ValueError, match=message):
        SFTStage(kind="sft", data=["file:x"], inputs={"model": "a"}, **values)


def test_only_what_trains_can_be_offloaded_and_the_key_does_not_know_it():
    offload = {"offload_optimizer": "cpu"}
    stage = {"kind": "eval", "benchmarks": [{"name": "a"}], "inputs": {"model": "m"}, "resources": offload}
    model = {"kind": "import", "model": "file:/m"}
    with pytest.raises(ValueError, match="a stage of kind eval trains nothing"):
        Pipeline(preset="p", stages={"m": model, "e": stage})
    values = {"kind": "rl", "data": ["file:x"]}
    assert result_config(RLStage.of(**values, resources=offload)) == result_config(RLStage.of(**values))
