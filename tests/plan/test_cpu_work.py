"""Seconds of a core against sums worked out by hand, and what the plan makes of them."""

import pytest

from nanodag.config import resolve
from nanodag.config.dial import shape_of
from nanodag.config.footprint import layer_activations
from nanodag.config.kinds.tokenizer import TokenizerStage
from nanodag.config.model_size import ModelSize
from nanodag.data.config import SourceConfig
from nanodag.host.folders import PROJECT
from nanodag.host.machine import machine_of
from nanodag.plan.case import Case, habit_of
from nanodag.plan.cpu_work import LOGIT_S, MOVED_BYTES_S, CpuWork, core_of
from nanodag.plan.make import plan_of
from nanodag.plan.sizes import Sizes
from nanodag.plan.small_stages import plan_tokenizer

FILE = PROJECT / "pipeline.yaml"
CPU = "cpu:2:avx512_bf16:8GiB"
SORT = "python:nanodag.data.lists:sort?size=10"
PROSE = "hub:wikimedia/wikipedia/20231101.en:train"
SIZES = resolve(FILE, "small", (), machine=machine_of(CPU)).pipeline.plan.data
MODEL = ModelSize(shape_of(3), 2048, 512)


def planned(preset, machine, *overrides):
    machine = machine_of(machine)
    return {
        stage.name: stage
        for stage in plan_of(resolve(FILE, preset, overrides, machine=machine).pipeline, machine).stages
    }


def test_training_is_products_attention_activations_and_logits_added_up():
    matrices = 3 * (4 * 192 * 192 + 3 * 192 * 512) + 2048 * 192
    products, attention = 6 * matrices / 480e9 / 0.8, 6 * 3 * 192 * 256 / 108e9 / 0.8
    moved = 3 * 3 * layer_activations(MODEL.shape, "bf16") / MOVED_BYTES_S
    work = core_of(machine_of(CPU), "bf16").training(MODEL, 1000, 256)
    assert work.shared == pytest.approx(1000 * (products + attention))
    assert work.alone == pytest.approx(1000 * (moved + 2048 * LOGIT_S))


def test_checkpointing_costs_a_third_of_the_products_more():
    core = core_of(machine_of(CPU), "fp32")
    plain, again = (core.training(MODEL, 1000, 256, checkpointing=on) for on in (False, True))
    assert again.shared == pytest.approx(plain.shared * 4 / 3) and again.alone > plain.alone


def test_reading_without_logits_leaves_the_head_out():
    core = core_of(machine_of(CPU), "fp32")
    whole, without = core.reading(MODEL, 1, 0), core.reading(MODEL, 1, 0, scored=0.0)
    assert whole.shared - without.shared == pytest.approx(2 * 2048 * 192 / 240e9 / 0.8)


def test_only_what_is_shared_is_quicker_on_more_threads():
    assert CpuWork(6.0, 2.0).on(3) == 4.0 and CpuWork(6.0, 2.0).total == 8.0


def test_a_precision_that_multiplies_faster_leaves_what_it_does_not_multiply():
    """bf16 has twice the peak of fp32 here; a step of this size gains less, as the parts measured alone did."""
    fast, slow = (core_of(machine_of(CPU), name).training(MODEL, 4096, 256).total for name in ("bf16", "fp32"))
    assert 1.3 < slow / fast < 2.0


def test_an_evaluation_beside_training_adds_nothing_to_the_runs_time():
    plan = planned("pocket", CPU)
    alone, beside = plan["eval_rl"], plan["eval_base"]
    assert beside.is_beside and not alone.is_beside
    assert beside.seconds == pytest.approx(beside.cpu_seconds / (2 / 3))  # two ranks on two cores, and it
    machine = machine_of(CPU)
    whole = plan_of(resolve(FILE, "pocket", (), machine=machine).pipeline, machine)
    assert whole.seconds == pytest.approx(sum(stage.seconds for stage in whole.stages if not stage.is_beside))


def test_groups_that_a_filter_drops_are_not_trained():
    all_of, half = (planned("pocket", CPU, f"plan.groups_with_spread={share}")["rl"].tokens for share in (1.0, 0.5))
    assert all_of == pytest.approx(2 * half, rel=1e-5)


def test_answers_are_as_long_as_the_datas_once_the_model_was_trained_on_conversations():
    pipeline = resolve(FILE, "pocket", (), machine=machine_of(CPU)).pipeline
    assert [habit_of(pipeline, name) for name in ("eval_base", "eval_mid", "rl")] == ["full", "data", "data"]
    imported = resolve(FILE, "gsm8k-rl", (), machine=machine_of("1x24GB")).pipeline
    assert habit_of(imported, "rl") == "half"
    assert [Sizes().mean_answer(SORT, 2048, habit, most=16) for habit in ("full", "data", "half")] == [16, 10, 8]
    assert Sizes(SIZES).mean_answer("hub:openai/gsm8k/main:train", 8192, "data", most=40) == 40


def test_text_of_a_mirror_is_what_its_footers_say(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "openai/gsm8k/main"
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"question": [f"{n:100d}" for n in range(50)]}), folder / "train.parquet")
    url = "hub:openai/gsm8k/main:train"
    assert 5000 <= Sizes(SIZES, tmp_path).text_bytes(url) < 6000
    assert Sizes(SIZES).text_bytes(url) == 7473 * 530
    (folder / "test.parquet").write_bytes(b"no parquet")
    assert Sizes(SIZES, tmp_path).text_bytes("hub:openai/gsm8k/main:test") == 1319 * 540, (
        "what reads it says that it is damaged"
    )


def test_a_tokenizer_reads_no_more_text_than_its_files_have(tmp_path):
    (tmp_path / "book.txt").write_text("a" * 300_000)
    data = [{"url": f"file:{tmp_path}/*.txt"}]
    stage = TokenizerStage(kind="tokenizer", data=data, vocabulary=512, max_bytes=1_000_000)
    case = Case(name="tokenizer", stage=stage, machine=machine_of(CPU), known_model=None, sizes=Sizes())
    assert plan_tokenizer(case).read_bytes == 300_000
    (tmp_path / "other.txt").write_text("a" * 900_000)
    assert plan_tokenizer(case).read_bytes == 1_000_000


def test_a_token_attends_to_its_own_piece_of_a_row_alone():
    attended_length = Sizes(SIZES).attended_length
    problems, prose = (SourceConfig(url=url, weight=1.0) for url in (SORT, PROSE))
    assert attended_length([problems], 2048, 256, is_chat=True) == 27  # what a row of them has
    assert attended_length([prose], 2048, 128, is_chat=False) == 128
    assert attended_length([problems, prose], 2048, 128, is_chat=True) == 78  # by weight: half of 27 + 128, up
    unknown = SourceConfig(url="python:someone.elses:rows")
    assert attended_length([unknown], 2048, 256, is_chat=False) == 256


def test_a_cache_on_a_cpu_takes_what_prompts_fill_and_must_have_room_for_the_rest():
    rl = planned("small", CPU)["rl"]
    sampler = next(process for process in rl.processes if process.name == "sampler")
    slots, token = 64, 2 * 4 * 256 * 2  # bfloat16, as the weights
    assert sampler.host["cache"] + sampler.reserve == slots * 1024 * token
    assert sampler.host["cache"] == slots * 256 * token  # 78 of a prompt and 128 of an answer, up to whole pages
    assert rl.most_host_bytes == rl.host_bytes + 2 * sampler.reserve
