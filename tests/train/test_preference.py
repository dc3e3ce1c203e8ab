"""Preferences: pairs behind one prompt, losses by independent formulas, stages in real workers."""

import json
import math
import random
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from nanodag import registry
from nanodag.config.pipeline import read_stage
from nanodag.model.architecture import read_json
from nanodag.model.folder import load, save
from nanodag.model.scorer import Scorer
from nanodag.rewards.reward_model import RewardModel
from nanodag.tokenizer.chat import load_renderer
from nanodag.tokenizer.encoding import Encoding
from nanodag.tokenizer.steps import step_ids
from nanodag.train.batches import _steps_of
from nanodag.train.objective import means_of, to_device
from nanodag.train.packing import make_batch, pair_piece
from nanodag.train.preference import (
    SURE,
    Preference,
    StepReward,
    _calibration,
    answer_logprobs,
    kto,
    reference_points,
    scored,
)
from tests.model.model_types import make_tiny, taken_by_transformers
from tests.train import forks, stages
from tests.train.ranks import first_model

CPU = torch.device("cpu")
ANSWERS = ("chosen", "rejected")


def ids(*tokens):
    return np.array(tokens, np.int32)


def answer(*tokens):
    return ids(*tokens), np.ones(len(tokens), bool)


def score(reward, prompt, answer):
    (found,) = reward.score_batch([(prompt, answer)])
    return found.value


class Alone:
    """A model on this process, called as an engine is."""

    device, world_size, rank = CPU, 1, 0

    def __init__(self, model):
        self.model = model

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def highest(self, value):
        return value

    def summed(self, *values):
        return list(values)


PAIRS = [
    pair_piece(ids(7, 8, 9), [answer(10, 11), answer(12, 13, 14, 15)]),
    pair_piece(ids(20, 21), [answer(22), answer(23, 24)]),
    pair_piece(ids(30, 31, 32, 33), [answer(34, 35, 36), (ids(34, 40, 41), np.array([True, False, True]))]),
]


def alone(model, piece):
    """Sums of log-probabilities of each answer behind its own prompt, without packing."""
    sums = []
    for tokens, mask in piece.answers:
        row = torch.tensor([[*piece.tokens.tolist(), *tokens.tolist()]])
        logits = model(row, torch.arange(row.shape[1])[None], torch.zeros_like(row), want="logits")[0].log_softmax(-1)
        places = range(len(piece.tokens) - 1, row.shape[1] - 1)
        sums.append(sum(logits[p, row[0, p + 1]] for p, kept in zip(places, mask, strict=True) if kept))
    return torch.stack(sums)


def test_packed_pairs_score_as_each_answer_behind_its_own_prompt_and_so_do_their_gradients():
    model = first_model()
    batch = make_batch([PAIRS[:2], PAIRS[2:]], num_rows=2, row_length=16, pad_id=0)
    sums, lengths = answer_logprobs(Alone(model), batch)
    expected = torch.stack([alone(model, piece) for piece in PAIRS])
    assert torch.allclose(sums, expected, atol=1e-5)
    assert lengths.tolist() == [[2, 4], [1, 2], [3, 2]]
    weights = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 1.0]])
    grads = []
    for values in (sums, expected):
        model.zero_grad()
        (values * weights).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*grads, atol=1e-5)


def test_a_prompt_stands_once_in_a_row_and_positions_of_both_answers_continue_it():
    batch = make_batch([[PAIRS[0]]], num_rows=1, row_length=10, pad_id=0)
    assert batch.input_ids[0].tolist() == [7, 8, 9, 10, 9, 12, 13, 14, 0, 0]
    assert batch.labels[0].tolist() == [-100, -100, 10, 11, 12, 13, 14, 15, -100, -100]
    assert batch.position_ids[0].tolist()[:8] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert to_device(batch, CPU).attend.sequences.tolist() == [[0, 2, -1], [2, 2, 0], [4, 4, 0], [8, 2, -1]]


def test_what_is_no_pair_is_never_trained():
    equal = pair_piece(ids(1, 2), [answer(3, 4), answer(3, 4)])
    empty = pair_piece(ids(1, 2), [answer(3), answer()])
    no_prompt = pair_piece(ids(1), [answer(3), answer(4)])
    cut_to_one = pair_piece(ids(1, 2), [answer(3, 4, 5), answer(3, 4, 6)]).shortened(5)
    no_room = pair_piece(ids(*range(9)), [answer(10), answer(11)]).shortened(8)
    assert not any(piece.trained.any() for piece in (equal, empty, no_prompt, cut_to_one, no_room))


def test_the_longer_answer_is_cut_first_and_the_row_is_filled():
    piece = pair_piece(ids(1, 2), [answer(*range(10, 13)), answer(*range(20, 30))]).shortened(9)
    assert [len(tokens) for tokens, _ in piece.answers] == [3, 5] and piece.num_positions == 9
    piece = pair_piece(ids(1, 2), [answer(*range(10, 30)), answer(*range(30, 50))]).shortened(12)
    assert [len(tokens) for tokens, _ in piece.answers] == [5, 6] and piece.num_positions == 12


def _plain(name, c, r, rc, rr, nc, nr):
    """Losses of one pair in plain arithmetic, as the papers write them, by default options."""
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    odds = lambda p: math.exp(p) / (1 - math.exp(p))  # noqa: E731
    delta = (c - rc) - (r - rr)
    mean = (c - rc) / nc - (r - rr) / nr
    return {
        "dpo": lambda: -math.log(sigma(0.1 * delta)),
        "dpo_norm": lambda: -math.log(sigma(2.0 * mean)),
        "robust": lambda: (0.1 * math.log(sigma(-0.1 * delta)) - 0.9 * math.log(sigma(0.1 * delta))) / 0.8,
        "ipo": lambda: (mean - 5.0) ** 2,
        "hinge": lambda: max(0.0, 1 - 0.1 * delta),
        "simpo": lambda: -math.log(sigma(2.0 * (c / nc - r / nr) - 1.0)),
        "orpo": lambda: -c / nc - 0.1 * math.log(sigma(math.log(odds(c / nc) / odds(r / nr)))),
        "kto": lambda: 1 - sigma(0.1 * (c - rc)) + 1 - sigma(-0.1 * (r - rr)),  # around a point of 0
    }[name]()


@pytest.mark.parametrize("name", registry.names("preference_loss"))
def test_a_loss_and_its_gradient_are_those_of_the_paper(name):
    draw = random.Random(name)
    loss = registry.load("preference_loss", name)
    for _ in range(30):
        lengths = [float(draw.randint(1, 40)) for _ in range(2)]
        c, r, rc, rr = (-n * draw.uniform(0.01, 5.0) for n in lengths * 2)
        own = torch.tensor([[c, r]], dtype=torch.float64, requires_grad=True)
        value = loss(own, torch.tensor([[rc, rr]], dtype=torch.float64), torch.tensor([lengths], dtype=torch.float64))
        assert math.isclose(value.item(), _plain(name, c, r, rc, rr, *lengths), rel_tol=1e-6, abs_tol=1e-9)
        value.sum().backward()
        step = 1e-6
        slopes = [
            (_plain(name, c + a, r + b, rc, rr, *lengths) - _plain(name, c - a, r - b, rc, rr, *lengths)) / (2 * step)
            for a, b in ((step, 0), (0, step))
        ]
        assert torch.allclose(own.grad[0], torch.tensor(slopes, dtype=torch.float64), rtol=1e-4, atol=1e-6)


def _plain_kto(answers, points, *, beta, good, bad):
    """Sum over (is good, log-probability, that of the reference)."""
    signed = [(beta * (p - r - points[0]), good) if is_good else (beta * (points[1] - p + r), bad)
              for is_good, p, r in answers]  # fmt: skip
    return sum(weight * (1 - 1 / (1 + math.exp(-x))) for x, weight in signed)


def test_kto_judges_each_answer_against_the_mean_gain_of_the_other_kind_and_no_gradient_flows_through_that():
    draw = random.Random(3)
    seen = set()
    for _ in range(30):
        answers = [(draw.random() < 0.5, -draw.uniform(1, 40), -draw.uniform(1, 40)) for _ in range(draw.randint(1, 7))]
        gains = {kind: [p - r for is_good, p, r in answers if is_good == kind] for kind in (True, False)}
        points = [max(0.0, sum(gains[kind]) / max(len(gains[kind]), 1)) for kind in (False, True)]
        seen |= {point > 0 for point in points}
        options = {"beta": draw.choice([0.05, 0.5]), "good": draw.uniform(0.5, 2), "bad": draw.uniform(0.5, 2)}
        own, reference, lengths = (torch.zeros(len(answers), 2, dtype=torch.float64) for _ in range(3))
        for row, (is_good, p, r) in enumerate(answers):
            own[row, 1 - is_good], reference[row, 1 - is_good], lengths[row, 1 - is_good] = p, r, 3
        own.requires_grad_()
        found = reference_points(Alone(None), (own - reference).detach(), lengths)
        assert found.tolist() == pytest.approx(points)
        named = dict(zip(("beta", "desirable_weight", "undesirable_weight"), options.values(), strict=True))
        value = kto(own, reference + found, lengths, **named).sum()
        value.backward()
        assert value.item() == pytest.approx(_plain_kto(answers, points, **options), rel=1e-9)
        for row, (is_good, p, r) in enumerate(answers):
            moved = [[*answers[:row], (is_good, p + step, r), *answers[row + 1 :]] for step in (1e-5, -1e-5)]
            up, down = (_plain_kto(one, points, **options) for one in moved)
            assert own.grad[row, 1 - is_good].item() == pytest.approx((up - down) / 2e-5, rel=1e-5, abs=1e-9)
            assert own.grad[row, int(is_good)] == 0
    assert seen == {True, False}


SINGLES = [
    PAIRS[0],
    pair_piece(ids(20, 21), [answer(22, 25), None]),
    pair_piece(ids(30, 31, 32), [None, answer(34, 35, 36)]),
]


def test_an_answer_alone_is_packed_scored_and_known_as_the_half_of_a_pair():
    batch = make_batch([SINGLES[:2], SINGLES[2:]], num_rows=2, row_length=16, pad_id=0)
    assert batch.answers == (0, 1, 2, 5)
    assert batch.input_ids[0].tolist()[8:12] == [20, 21, 22, 0] and batch.labels[0].tolist()[9:11] == [22, 25]
    model = first_model()
    sums, lengths = answer_logprobs(Alone(model), batch)
    assert lengths.tolist() == [[2, 4], [2, 0], [0, 3]]
    both = pair_piece(ids(20, 21), [answer(22, 25), answer(23)])
    assert sums[1].tolist() == pytest.approx([alone(model, both)[0].item(), 0.0], abs=1e-5)
    good, bad = (pair_piece(ids(1, 2), pair) for pair in ([answer(3, 4), None], [None, answer(3, 4)]))
    assert good.key != bad.key and bad.shortened(2).input_ids.tolist() == [1, 2]
    assert not bad.shortened(1).trained.any() and not pair_piece(ids(1, 2), [None, None]).trained.any()


def test_two_ranks_judge_answers_as_one_that_has_all():
    model, reference = first_model(), {SINGLES[0].key: (-9.0, -22.0), SINGLES[1].key: (-9.5, 0.0)}
    objective = Preference()
    objective._loss, objective._sft_weight, objective._judges_alone = kto, 0.1, True
    objective._reference = reference | {SINGLES[2].key: (0.0, -15.0)}
    whole, first, second = (
        make_batch([rows], num_rows=1, row_length=32, pad_id=0) for rows in (SINGLES, SINGLES[:1], SINGLES[1:])
    )
    said, engine = [], Alone(model)
    engine.summed = lambda *values: said.append(np.array(values)) or list(values)
    for batch in (first, second):
        objective.loss(engine, batch)
    engine.summed = lambda *values: sum(said).tolist()
    parts = [objective.loss(engine, batch) for batch in (first, second)]
    loss, sums = objective.loss(Alone(model), whole)
    assert objective.count(whole) == 4 == objective.count(first) + objective.count(second)
    assert loss.item() == pytest.approx(sum(part.item() for part, _ in parts), abs=1e-6)
    assert not math.isclose(objective.loss(Alone(model), first)[0].item(), parts[0][0].item(), rel_tol=1e-3)
    means = means_of({name: value.item() for name, value in sums.items()}, 4)
    own = answer_logprobs(Alone(model), whole)[0]
    assert means["chosen_gain"] == pytest.approx((own[:2, 0].sum().item() + 9 + 9.5) / 2, abs=1e-5)


def test_smoothed_dpo_takes_a_share_of_pairs_for_swapped():
    loss = registry.load("preference_loss", "dpo", {"beta": 0.5, "label_smoothing": 0.2})
    value = loss(torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2))
    expected = -0.8 * logsigmoid(torch.tensor(1.0)) - 0.2 * logsigmoid(torch.tensor(-1.0))
    assert torch.allclose(value, expected[None])


@pytest.mark.parametrize("name", registry.names("preference_loss"))
def test_extreme_leads_give_finite_losses_and_gradients(name):
    loss = registry.load("preference_loss", name)
    own = torch.tensor([[-1e-9, -1e4], [-1e4, -1e-9], [-5.0, -5.0]], requires_grad=True)
    loss(own, torch.zeros(3, 2), torch.ones(3, 2)).sum().backward()
    assert torch.isfinite(own.grad).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")
    stages.write_inputs(folder)
    draw, rows = random.Random(1), [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    singles = [(row, draw.random() < 0.7) for row in rows]
    rows = [{"prompt": r["prompt"], "completion": r["chosen" if good else "rejected"], "label": good}
            for r, good in singles]  # fmt: skip
    (folder / "singles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # A wrong step is a letter: what is tested is the stage, and not whether a tiny model learns to sort.
    right = [(row["prompt"], row["chosen"].split()) for row, _ in singles for _ in ANSWERS]
    steps = [(prompt, [(step, draw.random() < 0.6) for step in said]) for prompt, said in right]
    rows = [{"prompt": prompt, "completions": [step if good else "x" for step, good in said],
             "labels": [good for _, good in said]} for prompt, said in steps]  # fmt: skip
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def job(folder, name, **changes):
    """A workspace whose store is its own, so that it finds nothing that others kept."""
    return stages.make_job(folder / name / "work", stages.preference(folder, **changes), {"model": folder / "model"})


@pytest.fixture(scope="module")
def dpo(folder):
    workspace = job(folder, "dpo")
    return stages.finish(workspace)["metrics"], workspace


def test_a_stage_prefers_what_its_pairs_prefer(dpo):
    metrics, workspace = dpo
    first = next(line for line in stages.metrics(workspace) if line["event"] == "step")
    assert math.isclose(first["loss"], math.log(2), abs_tol=1e-6) and first["chosen_gain"] == first["lead"] == 0.0
    assert metrics["validation_accuracy"] > 0.9 and metrics["validation_loss"] < 0.5
    assert metrics["rows_trained"][0]["trained"] == metrics["records"] > 200


def kto_of_singles(folder):
    data = [{"url": f"file:{folder / 'singles.jsonl'}", "held_out": 0.1}]
    return {"loss": {"name": "kto", "options": {"beta": 0.5}}, "data": data}


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_kto_learns_from_single_answers_and_begins_between_good_and_bad(folder, lora_rank):
    rate = 0.01 if lora_rank else 0.003
    optimizer = {"name": "adamw", "learning_rate": rate, "matrix_lr": rate, "lora_rank": lora_rank}
    workspace = job(folder, f"kto-{lora_rank}", optimizer=optimizer, num_epochs=6, **kto_of_singles(folder))
    metrics = stages.finish(workspace)["metrics"]
    first = next(line for line in stages.metrics(workspace) if line["event"] == "step")
    assert math.isclose(first["loss"], 0.5, abs_tol=1e-6) and first["chosen_gain"] == first["lead"] == 0.0
    last = [line for line in stages.metrics(workspace) if "validation_chosen_gain" in line][-1]
    assert metrics["validation_accuracy"] > 0.8
    assert last["validation_chosen_gain"] > last["validation_rejected_gain"] + 5


def test_kto_learns_from_pairs_too(folder):
    metrics = stages.finish(job(folder, "kto-pairs", loss={"name": "kto", "options": {"beta": 0.5}}))["metrics"]
    assert metrics["validation_accuracy"] > 0.9


@pytest.mark.parametrize("kind", ["preference", "reward_model"])
def test_a_loss_of_pairs_refuses_a_row_with_one_answer_and_says_which_takes_it(folder, kind):
    workspace = job(folder, f"refuses-{kind}", kind=kind, data=kto_of_singles(folder)["data"])
    stages.start(workspace).wait(timeout=300)
    said = (workspace / "worker.log").read_text()
    assert re.search(
        r"row \d+ of file:.*singles.jsonl: A preference needs answers `chosen` and `rejected`; found", said
    )
    assert "One answer alone is for kind preference with loss: kto. The row's columns are completion" in said


@pytest.mark.parametrize("option", ["beta", "desirable_weight", "undesirable_weight"])
def test_options_of_kto_that_learn_nothing_are_refused(folder, option):
    loss = {"name": "kto", "options": {option: 0.0}}
    with pytest.raises(ValueError, match=rf"loss.options.{option} 0.0 would learn nothing"):
        read_stage(stages.preference(folder, loss=loss))


def test_what_the_first_weights_say_of_all_pairs_is_computed_once_for_another_beta(folder, dpo):
    workspace = stages.make_job(
        folder / "beta",
        stages.preference(folder, loss={"name": "dpo", "options": {"beta": 0.5}}),
        {"model": folder / "model"},
    )
    (workspace / "held_out").symlink_to(dpo[1] / "held_out")
    stages.finish(workspace)
    assert "Scoring all pairs" in (dpo[1] / "worker.log").read_text()
    assert "Scoring all pairs" not in (workspace / "worker.log").read_text()
    assert stages.metrics(workspace)[1]["lead"] == 0.0


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, {}),
        (2, {"zero_stage": 3, "loss": "ipo", "sft_weight": 0.1}),
        (2, {"zero_stage": 2, "patience": 9}),
        (2, {"kind": "reward_model"}),
        (2, {"kind": "reward_model", "judges": "steps", "zero_stage": 3}),
        (2, {"loss": "kto", "zero_stage": 2}),
    ],
    ids=["alone", "zero-3", "best-weights", "reward-model", "of-steps", "kto-of-singles"],
)
def test_a_killed_preference_stage_ends_on_the_same_bytes(folder, num_ranks, changes):
    resources = {**stages.RESOURCES, "num_ranks": num_ranks}
    name = "-".join(["kill", str(num_ranks), *map(str, changes)])
    options = {**changes, "resources": resources, "checkpoint_every": 2, "precision": "fp32"}
    if changes.get("loss") == "kto":
        options |= kto_of_singles(folder)
    if changes.get("judges") == "steps":
        options |= of_steps(folder)
    whole, killed = (job(folder, f"{name}-{what}", **options) for what in ("whole", "killed"))
    forks.end(forks.start(whole, num_ranks=num_ranks))
    forks.interrupt(killed, after_step=5, with_signal=signal.SIGKILL, num_ranks=num_ranks)
    assert not (killed / "result.json").exists()
    if (killed / "held_out").exists():  # what was kept of the first weights is computed again
        (killed / "held_out").rename(killed / "gone")
    forks.end(forks.start(killed, num_ranks=num_ranks))
    assert stages.content(killed / "output") == stages.content(whole / "output")
    results = [json.loads((one / "result.json").read_text())["metrics"] for one in (whole, killed)]
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_a_loss_without_a_reference_scores_nothing_before_it_trains(folder, name):
    workspace = job(folder, name, loss=name, max_steps=2)
    stages.finish(workspace)
    assert "Scoring all pairs" not in (workspace / "worker.log").read_text()


def test_pairs_that_are_none_are_counted_and_dropped(folder):
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()][:40]
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[5]["chosen"] = "  "
    rows[7]["prompt"] = "1 " * 200
    (folder / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workspace = job(folder, "bad", data=[f"file:{folder / 'bad.jsonl'}"], num_epochs=1, validation_tokens=0)
    metrics = stages.finish(workspace)["metrics"]
    assert metrics["dropped_records"] == 3 and metrics["rows_trained"][0]["trained"] == 37


@pytest.fixture(scope="module")
def reward_model(folder):
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    settings = {**stages.preference(folder, optimizer={"name": "adamw", "learning_rate": 0.01, "matrix_lr": 0.01})}
    settings |= {"kind": "reward_model", "centring": 0.01}
    workspace = stages.make_job(folder / "rm", settings, {"model": folder / "model"})
    return stages.finish(workspace)["metrics"], workspace, rows


def test_a_reward_model_tells_better_answers_and_transformers_gives_the_same_scores(folder, reward_model):
    metrics, workspace, rows = reward_model
    assert metrics["validation_accuracy"] > 0.9
    first = next(line for line in stages.metrics(workspace) if line["event"] == "step")
    assert math.isclose(first["loss"], math.log(2), abs_tol=1e-6)
    reward = RewardModel(str(workspace / "output"))
    model = load(workspace / "output", scores=True)
    renderer = load_renderer(workspace / "output")
    for row in rows[:20]:
        prompt = {"messages": [{"role": "user", "content": row["prompt"]}]}
        ids, _ = renderer.render_batch([[*prompt["messages"], {"role": "assistant", "content": row["chosen"]}]])[0]
        row_ids = torch.tensor(ids.astype(np.int64))[None]
        places = torch.arange(row_ids.shape[1])[None]
        own = model(row_ids, places, document_ids=torch.zeros_like(row_ids), places=places[0, -1:])
        assert score(reward, prompt, row["chosen"]) == pytest.approx(own.item(), abs=1e-5)
    right = [score(reward, {"messages": [{"role": "user", "content": r["prompt"]}]}, r["chosen"]) for r in rows[:20]]
    wrong = [score(reward, {"messages": [{"role": "user", "content": r["prompt"]}]}, r["rejected"]) for r in rows[:20]]
    assert sum(a > b for a, b in zip(right, wrong, strict=True)) > 16
    asked = [({"messages": [{"role": "user", "content": r["prompt"]}]}, r[name]) for r in rows[:9] for name in ANSWERS]
    assert [found.value for found in reward.score_batch(asked)] == [score(reward, *one) for one in asked]


def of_steps(folder):
    data = [{"url": f"file:{folder / 'steps.jsonl'}", "held_out": 0.1}]
    return {"kind": "reward_model", "judges": "steps", "step_separator": "\n", "data": data}


def steps_piece(prompt, steps, labels):
    """As of a record of whose texts these are the tokens; 4 ends a turn."""
    renderer = SimpleNamespace(prompt=lambda messages, switches: prompt, stop_ids=(4,))
    encoding = SimpleNamespace(encode_batch=lambda texts: steps)
    record = {"messages": [], "steps": [*map(str, range(len(steps)))], "labels": labels}
    return _steps_of(record, renderer, encoding, "\n")


def test_a_step_is_judged_at_its_last_token_by_binary_cross_entropy_and_cut_with_its_labels():
    model = drawn_scorer()
    piece = steps_piece([7, 8, 9], [[10, 11], [12], [13, 14]], [1.0, 0.0, 0.25])
    other = steps_piece([20], [[21, 22]], [1.0])
    batch = make_batch([[piece, other], [piece.shortened(6)]], num_rows=2, row_length=14, pad_id=0)
    assert batch.judged == (1.0, 0.0, 0.25, 1.0, 1.0, 0.0)
    loss, sums = StepReward().loss(Alone(model), batch)
    expected, told = 0.0, []
    whole = [7, 8, 9, 10, 11, 12, 13, 14, 4]
    answers = [(whole, (4, 5, 8), (1, 0, 0.25)), ([20, 21, 22, 4], (3,), (1,)), (whole[:6], (4, 5), (1, 0))]
    for tokens, places, labels in answers:
        row = torch.tensor([tokens])
        at = torch.arange(row.shape[1])[None]
        found = model(row, at, document_ids=torch.zeros_like(row), places=torch.tensor(places)).tolist()
        for score_, label in zip(found, labels, strict=True):
            p = 1 / (1 + math.exp(-score_))
            expected -= label * math.log(p) + (1 - label) * math.log(1 - p)
            told.append((p > 0.5) == (label > 0.5))
    assert loss.item() == pytest.approx(expected, rel=1e-5) and sums["accuracy"] == sum(told)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_reward_model_tells_right_steps_from_wrong_ones_and_an_answer_has_their_least(folder, lora_rank):
    optimizer = {"name": "adamw", "learning_rate": 0.01, "matrix_lr": 0.01, "lora_rank": lora_rank}
    workspace = job(folder, f"steps-{lora_rank}", **of_steps(folder), optimizer=optimizer)
    metrics = stages.finish(workspace)["metrics"]
    first, last = stages.metrics(workspace)[1], [m for m in stages.metrics(workspace) if "validation_accuracy" in m][-1]
    assert math.isclose(first["loss"], math.log(2), abs_tol=1e-6)
    assert metrics["validation_accuracy"] > 0.85 and last["validation_accuracy_of_wrong"] > 0.7
    model, renderer = load(workspace / "output", scores=True), load_renderer(workspace / "output")
    prompt, encoding = {"messages": [{"role": "user", "content": "Sort: 3 1 2"}]}, Encoding(workspace / "output")
    tokens, places = step_ids(
        renderer.prompt(prompt["messages"]), encoding.encode_batch(["1\n", "3\n", "2"]), renderer.stop_ids[:1]
    )
    row = torch.tensor([tokens])
    at = torch.arange(row.shape[1])[None]
    found = model(row, at, document_ids=torch.zeros_like(row), places=torch.tensor(places)).sigmoid().tolist()
    ways = {"min": min(found), "mean": sum(found) / 3, "last": found[2], "product": found[0] * found[1] * found[2]}
    for name, value in ways.items():
        reward = RewardModel(str(workspace / "output"), steps=name)
        assert score(reward, prompt, "1\n3\n\n2\n") == pytest.approx(value, abs=1e-5)


def test_steps_without_sense_are_refused(folder):
    rows = [{"prompt": "a", "completions": ["1", "2\n3"], "labels": [True, False]}]
    (folder / "inside.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workspace = job(folder, "inside", **of_steps(folder) | {"data": [f"file:{folder / 'inside.jsonl'}"]})
    stages.start(workspace).wait(timeout=300)
    assert "A step holds the stage's step_separator '\\n': '2\\n3'" in (workspace / "worker.log").read_text()
    with pytest.raises(ValueError, match="centring and margin_weight are of pairs"):
        read_stage(stages.preference(folder, **of_steps(folder), centring=0.1))


def drawn_scorer():
    model = Scorer(first_model().architecture)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    for parameter in model.model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


def test_how_sure_a_reward_model_is_stands_beside_how_often_it_is_right():
    lead = torch.logit(torch.tensor([0.56, 0.44, 0.58, 0.93, 0.99, 0.96, 0.04]))  # p of the chosen answer, by its lead
    sums = {name: float(value) for name, value in _calibration(lead).items()}
    means = means_of(sums, 7)
    assert {name: means[name] for name in ("right_55", "right_65", "right_95")} == {
        "right_55": pytest.approx(2 / 3), "right_65": 0.0, "right_95": 0.75,
    }  # fmt: skip
    assert [round(7 * means[f"sure_{percent}"]) for percent in SURE] == [3, 0, 0, 0, 4]


def test_packed_scores_are_those_of_each_answer_alone():
    model = drawn_scorer()
    pieces = [pair_piece(p.tokens, p.answers, scores_ends=True) for p in PAIRS]
    moved = to_device(make_batch([pieces[:2], pieces[2:]], num_rows=2, row_length=20, pad_id=0), CPU)
    scores = model(moved.input_ids, moved.position_ids, attend=moved.attend, places=moved.label_places)
    expected = []
    for piece in PAIRS:
        for tokens, _ in piece.answers:
            row = torch.tensor([[*piece.tokens.tolist(), *tokens.tolist()]])
            places = torch.arange(row.shape[1])
            expected += model(row, places[None], document_ids=torch.zeros_like(row), places=places[-1:]).tolist()
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "falcon_h1"])
def test_pairs_through_transformers_score_as_each_answer_alone(name, tmp_path):
    make_tiny(name, tmp_path / "model")
    taken_by_transformers(tmp_path / "model")
    model = load(tmp_path / "model")
    sums, _ = answer_logprobs(Alone(model), make_batch([PAIRS[:2], PAIRS[2:]], num_rows=2, row_length=16, pad_id=0))
    assert torch.allclose(sums, torch.stack([alone(model, piece) for piece in PAIRS]), atol=1e-5)


def test_adapters_alone_learn_preferences_and_begin_at_the_reference(folder):
    optimizer = {"name": "adamw", "learning_rate": 0.01, "matrix_lr": 0.01, "lora_rank": 4}
    workspace = job(folder, "lora", optimizer=optimizer)
    metrics = stages.finish(workspace)["metrics"]
    first = next(line for line in stages.metrics(workspace) if line["event"] == "step")
    assert math.isclose(first["loss"], math.log(2), abs_tol=1e-6)
    assert metrics["validation_accuracy"] > 0.9
    assert (workspace / "output" / "adapter" / "adapter_model.safetensors").exists()


def test_a_reward_model_with_adapters_trains_its_head_too(folder):
    optimizer = {"name": "adamw", "learning_rate": 0.01, "matrix_lr": 0.01, "lora_rank": 4}
    workspace = job(folder, "rm-lora", kind="reward_model", optimizer=optimizer)
    assert stages.finish(workspace)["metrics"]["validation_accuracy"] > 0.9


@pytest.mark.parametrize("change", [{}, {"pad_token": "<|end|>"}, {"eos_token": "<|bos|>"}], ids=str)
def test_scores_are_read_where_an_answer_ends_whatever_the_tokenizer_calls_so(folder, tmp_path, change):
    source = tmp_path / "source"
    shutil.copytree(folder / "model", source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, **change}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    (source / "generation_config.json").unlink()
    model = load(source, scores=True)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    save(tmp_path / "saved", dict(model.named_parameters()), tokenizer=source, source=source, model=model)
    turns = [{"role": "user", "content": "Sort: 2 1"}, {"role": "assistant", "content": "1 2"}]
    ids = torch.tensor(load_renderer(source).render_batch([turns])[0][0].astype(np.int64))[None]
    places = torch.arange(ids.shape[1])[None]
    own = model(ids, places, document_ids=torch.zeros_like(ids), places=places[0, -1:]).item()
    reward = RewardModel(str(tmp_path / "saved"))
    assert score(reward, {"messages": turns[:1]}, "1 2") == pytest.approx(own, abs=1e-5)


def test_a_pair_that_the_reference_does_not_know_is_an_error():
    objective = Preference()
    objective._loss, objective._sft_weight = registry.load("preference_loss", "dpo"), 0.0
    objective._judges_alone = False
    objective._reference = {PAIRS[0].key: (-1.0, -2.0)}
    with pytest.raises(KeyError):
        objective.loss(Alone(first_model()), make_batch([PAIRS[1:2]], num_rows=1, row_length=16, pad_id=0))


def test_the_same_weights_by_another_config_are_scored_anew(folder, dpo):
    other = folder / "other"
    shutil.copytree(folder / "model", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    workspace = stages.make_job(folder / "other-dpo", stages.preference(folder, max_steps=2), {"model": other})
    (workspace / "held_out").symlink_to(dpo[1] / "held_out")
    stages.finish(workspace)
    assert "Scoring all pairs" in (workspace / "worker.log").read_text()


def test_a_stop_while_pairs_are_scored_ends_the_stage_as_one_to_be_started_again(monkeypatch):
    monkeypatch.setattr("nanodag.train.preference.stop_requested", lambda: True)
    monkeypatch.setattr("nanodag.train.preference.leave_stopped", lambda: sys.exit(75))
    batch = make_batch([PAIRS[:1]], num_rows=1, row_length=16, pad_id=0)
    with pytest.raises(SystemExit, match="75"):
        scored(Alone(first_model()), iter([batch]), batch)


SCORED_BY_TRANSFORMERS = ["gemma2", "gemma3_text", "qwen3_moe", "mixtral", "phi3", "deepseek_v3", "gpt_oss", "glm4"]


@pytest.mark.parametrize("name", [*SCORED_BY_TRANSFORMERS, "llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_a_reward_model_scores_in_transformers_as_here(folder, name, tmp_path):
    make_tiny(name, tmp_path / "model")
    if name in SCORED_BY_TRANSFORMERS:
        taken_by_transformers(tmp_path / "model")
    model = load(tmp_path / "model", scores=True)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    tensors = {key: tensor.detach() for key, tensor in model.named_parameters()}
    save(tmp_path / "scorer", tensors, tokenizer=folder / "tokenizer", source=tmp_path / "model", model=model)
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scorer", dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    )
    ids = torch.arange(5, 25)[None]
    places = torch.arange(20)[None]
    own = model(ids, places, document_ids=torch.zeros_like(ids), places=places[0, -1:])
    assert own.item() == pytest.approx(theirs(input_ids=ids).logits.item(), abs=1e-5)
    if name not in SCORED_BY_TRANSFORMERS:
        assert load(tmp_path / "scorer", scores=True).score.weight.equal(model.score.weight)


@pytest.mark.parametrize(("name", "zero_stage"), [("gemma2", 0), ("qwen3_moe", 3)])
def test_a_killed_reward_model_over_transformers_layers_ends_on_the_same_bytes(folder, name, zero_stage):
    model = folder / name
    make_tiny(name, model, vocab_size=read_json(folder / "model" / "config.json")["vocab_size"])
    taken_by_transformers(model)
    for path in (folder / "model").iterdir():
        if not (model / path.name).exists():
            shutil.copy(path, model / path.name)
    changes = {"kind": "reward_model", "zero_stage": zero_stage, "checkpoint_every": 2, "max_steps": 6}
    settings = stages.preference(folder, **changes, resources={**stages.RESOURCES, "num_ranks": 2})
    jobs = [stages.make_job(folder / f"{name}-{what}" / "work", settings, {"model": model}) for what in ("a", "b")]
    forks.end(forks.start(jobs[0], num_ranks=2))
    forks.interrupt(jobs[1], after_step=3, with_signal=signal.SIGKILL, num_ranks=2)
    forks.end(forks.start(jobs[1], num_ranks=2))
    assert stages.content(jobs[0] / "output") == stages.content(jobs[1] / "output")
    reward = RewardModel(str(jobs[0] / "output"))
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()][:9]
    prompts = [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    assert len({score(reward, prompt, row["chosen"]) for prompt, row in zip(prompts, rows, strict=True)}) > 1
