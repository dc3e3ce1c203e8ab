"""CORE and benchmarks while training: by all ranks, at their steps, without a trace in the weights."""

import json
import random
import signal
import time
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.config.pipeline import read_stage
from nanodag.data.core_tasks import TASKS
from nanodag.evaluation.core import run_core
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.harness import run_benchmark
from nanodag.train.loop import Loop, Stopped
from tests.core_bundle import write_bundle
from tests.evaluation.tiny import asked_by
from tests.train import forks, stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = stages.with_inputs(tmp_path_factory.mktemp("core"))
    write_bundle(folder)
    return folder


def job(folder, name, *, every, **changes):
    config = stages.pretrain(
        folder, core_every=every, core_limit=11, core_bundle=str(folder / "eval_data"), sample_prompts=[], **changes
    )
    config["shape"] |= {"max_positions": 512}  # of ten worked examples none is cut
    return stages.make_job(folder / name, config, {"tokenizer": folder / "tokenizer"})


def core_lines(workspace):
    lines = [line for line in stages.metrics(workspace) if line["event"] == "eval" and "core" in line]
    return {line["step"]: [line["core"], *(line[f"core_{task.label}"] for task in TASKS)] for line in lines}


def of_eval_stage(folder, workspace):
    """The published model's, as an eval stage scores it."""
    model = EvaluatedModel(workspace / "output", asked_by(max_new_tokens=4))
    config = BenchmarkConfig(name="core", source=f"file:{folder}/eval_data/*/*.jsonl", limit=11)
    scores = run_core(model, config).scores
    return pytest.approx([scores["core"].value, *(scores[task.label].value for task in TASKS)])


SLOW = pytest.mark.slow
RANKS = [(1, 1), (2, 3), pytest.param(2, 0, marks=SLOW), pytest.param(2, 1, marks=SLOW)]


@pytest.mark.parametrize(("num_ranks", "zero_stage"), RANKS)
def test_it_is_the_eval_stages_and_leaves_every_byte_as_it_was(folder, num_ranks, zero_stage):
    changes = {"zero_stage": zero_stage, "resources": {**stages.RESOURCES, "num_ranks": num_ranks}}
    changes |= {"horizon_tokens": 512 * 6, "micro_batch_tokens": 128}
    workspaces = []
    for every in (0, 4):
        workspaces.append(job(folder, f"{num_ranks}-{zero_stage}-{every}", every=every, **changes))
        forks.end(forks.start(workspaces[-1], num_ranks=num_ranks))
        assert (workspaces[-1] / "result.json").exists(), (workspaces[-1] / "worker.log").read_text()[-6000:]
    without, scored = workspaces
    assert stages.content(scored / "output") == stages.content(without / "output")
    found = core_lines(scored)
    assert list(found) == [4, 6]
    assert found[6] == of_eval_stage(folder, scored)
    assert json.loads((scored / "result.json").read_text())["metrics"]["core"] == found[6][0]


def test_a_killed_stage_ends_on_the_same_weights_and_the_same_scores(folder):
    wanted, killed = (job(folder, name, every=5) for name in ("undisturbed", "killed"))
    stages.finish(wanted)
    forks.interrupt(killed, after_step=7, with_signal=signal.SIGKILL)
    assert not (killed / "result.json").exists()
    stages.finish(killed)
    assert stages.content(killed / "output") == stages.content(wanted / "output")
    assert core_lines(killed) == core_lines(wanted)
    assert list(core_lines(killed)) == [5, 10, 12]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_two_ranks_either_is_killed_twenty_times_at_random_and_weights_and_scores_stay_the_same(folder):
    changes = {"zero_stage": 1, "resources": {**stages.RESOURCES, "num_ranks": 2}, "horizon_tokens": 512 * 6}
    wanted = job(folder, "two-undisturbed", every=1, **changes)
    forks.end(forks.start(wanted, num_ranks=2))
    draw, num_killed, num_stages, amid_core = random.Random(14), 0, 0, 0
    while num_killed < 20:
        killed = job(folder, f"two-killed-{num_stages}", every=1, **changes)
        num_stages += 1
        while not (killed / "result.json").exists():
            ranks = forks.start(killed, num_ranks=2)
            if num_killed < 20 and wait_for_lines(ranks, killed, draw.randint(1, 60)):
                time.sleep(draw.uniform(0, 0.02))
                amid_core += is_amid_core(killed)
                draw.choice(ranks).kill()
            codes = forks.end(ranks)
            assert -signal.SIGKILL in codes or set(codes) == {0}, (killed / "worker.log").read_text()[-6000:]
            num_killed += -signal.SIGKILL in codes
        assert stages.content(killed / "output") == stages.content(wanted / "output")
        assert core_lines(killed) == core_lines(wanted) and list(core_lines(wanted)) == [1, 2, 3, 4, 5, 6]
    assert amid_core >= 5, f"{amid_core} of {num_killed} kills came while CORE was scored"
    print(f"{num_killed} kills, {amid_core} amid CORE, of {num_stages} stages")


def lines_of(workspace):
    path = workspace / "metrics.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def wait_for_lines(ranks, workspace, more):
    """Until so many more are told; False where a rank ended before."""
    wanted = len(lines_of(workspace)) + more
    while all(rank.poll() is None for rank in ranks):
        if len(lines_of(workspace)) >= wanted:
            return True
        time.sleep(0.001)
    return False


def is_amid_core(workspace):
    """Whether what was told last is how many of CORE's tasks are done."""
    *_, last = lines_of(workspace)
    told = json.loads(last) if last.endswith(b"}") else {}
    return told.get("phase") == "CORE" and told["done"] < told["of"]


class CountedLoop(Loop):
    """A loop whose steps train nothing."""

    def _step(self):
        self.progress.step += 1

    num_saved = 0

    def _save(self):
        self.num_saved, self._saved_step = self.num_saved + 1, self.progress.step


def test_a_stop_amid_core_leaves_a_checkpoint_from_which_it_is_scored_again():
    all_right = dict.fromkeys([task.label for task in TASKS], 1.0)
    answers, written = [all_right, None, None, all_right, all_right], []
    stage = SimpleNamespace(
        config=SimpleNamespace(core_every=2, benchmarks=(), patience=0, checkpoint_every=100),
        num_steps=5,
        engine=SimpleNamespace(highest=float),
        score_core=lambda step, write: answers.pop(0),
        **dict.fromkeys(("source", "validation", "checkpoint")),
    )
    loop = CountedLoop(stage)
    loop.write = lambda step, **values: written.append((step, values["core"]))
    with pytest.raises(Stopped):
        loop.run()
    assert (loop.num_saved, loop.progress.core_step, written) == (1, 2, [(2, 1.0)])
    with pytest.raises(Stopped):  # started again and stopped again: its checkpoint is there already
        loop.run()
    assert (loop.num_saved, loop.progress.step) == (1, 4)
    loop.run()
    assert written == [(2, 1.0), (4, 1.0), (5, 1.0)]


SORT = {"url": 'python:nanodag.data.lists:sort?count=3&size=6&seed=7&split="test"', "adapter": "problem"}
SORTING = {"name": "sort", "form": "problems", "source": SORT, "max_new_tokens": 8}
ASKED = {"benchmarks": [SORTING], "benchmarks_every": 5}


def asked_job(folder, name, **changes):
    config = stages.sft(folder, sample_prompts=[], precision="fp32", patience=0, **changes)
    return stages.make_job(folder / name, config, {"model": folder / "base" / "output"})


def asked_lines(workspace):
    lines = [line for line in stages.metrics(workspace) if line.get("benchmark") == "sort"]
    return [(line["step"], line["benchmark_sort"], line["low"], line["high"]) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_benchmarks_are_asked_as_by_an_eval_stage_and_a_killed_stage_ends_on_the_same_bytes_and_scores(folder):
    stages.finish(job(folder, "base", every=0))
    without, wanted, killed = (
        asked_job(folder, name, **(ASKED if name != "quiet" else {})) for name in ("quiet", "asked", "asked-killed")
    )
    stages.finish(without)
    metrics = stages.finish(wanted, fresh=True)["metrics"]  # its worker starts another one under a watchdog
    moments = (
        lambda: (killed / "asked" / "job.json").exists(),  # while it asks
        lambda: max((line["step"] for line in stages.metrics(killed)), default=0) >= 6,
    )
    for is_due in moments:
        worker = stages.start(killed, fresh=True)
        while not is_due():
            assert worker.poll() is None
            time.sleep(0.05)
        worker.kill()
        worker.wait()
    stages.finish(killed, fresh=True)
    assert stages.content(wanted / "output") == stages.content(without / "output")
    assert stages.content(killed / "output") == stages.content(wanted / "output")
    steps = [*range(5, metrics["steps"], 5), metrics["steps"]]
    assert asked_lines(killed) == asked_lines(wanted) and [line[0] for line in asked_lines(wanted)] == steps
    assert metrics["benchmark_sort"] == asked_lines(wanted)[-1][1]
    config = BenchmarkConfig.model_validate(SORTING)
    model = EvaluatedModel(wanted / "output", asked_by(max_new_tokens=256))
    result = run_benchmark(model, config, chat=True, seed=3, mirror="", folder=folder)
    kept = wanted / "records" / "benchmarks" / f"step-{steps[-1]:08d}.sort.jsonl"
    assert [json.loads(line)["output"] for line in kept.read_text().splitlines()] == [
        record["output"] for record in result.records
    ]
    assert not (wanted / "asked").exists()


def test_benchmarks_of_a_stage_that_trains_are_checked_and_planned_as_an_eval_stages(folder):
    asked = read_stage(stages.sft(folder, **ASKED)).own_evaluation("sft")
    assert (asked.inputs, asked.precision, asked.sampler.engine, asked.seed) == (
        {"model": "sft"},
        "fp32",
        "embedded",
        3,
    )
    assert [benchmark.name for benchmark in asked.benchmarks] == ["sort"]
    assert read_stage(stages.sft(folder)).own_evaluation("sft") is None
    refused = {"two benchmarks are called": [SORTING, SORTING], "core_every": [{"name": "core"}]}
    for why, wrong in {**refused, "mean over nanochat's": [{**SORTING, "name": "chat_core"}]}.items():
        with pytest.raises(ValidationError, match=why):
            read_stage(stages.sft(folder, benchmarks=wrong))
