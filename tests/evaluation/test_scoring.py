import copy
import random
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from nanodag.errors import ConfigError, TrainingDiverged
from nanodag.model import attention, scoring
from nanodag.model.folder import load
from nanodag.model.scoring import Question, batch_of, score_questions
from tests.flash import bottom_right

QUESTIONS = [
    Question((5, 6, 7, 8, 9, 10), ((11,), (12, 13), (14, 15, 16, 17))),
    Question((20,), ((21, 22),)),
    Question((30, 31, 32), ((33,), (34,), (35,))),
    Question((5, 6, 7), ((8, 9, 10, 11), (8, 9))),
    Question((5, 6, 7), ((8, 9, 10, 11, 12), (8, 9, 13, 14), (8, 9, 13, 15, 16))),
]


@pytest.fixture(params=["qwen3", "llama"])
def folder(request, models):
    return models[request.param]


@pytest.fixture
def model(folder):
    return load(folder)


@pytest.fixture
def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def one_by_one(oracle, context, answer):
    """By transformers, each answer in a forward pass of its own, without padding, mask or shared context."""
    logprobs = oracle(torch.tensor([[*context, *answer]])).logits[0].log_softmax(-1)
    places = range(len(context) - 1, len(context) + len(answer) - 1)
    total = sum(logprobs[place, token].item() for place, token in zip(places, answer, strict=True))
    return total, all(logprobs[place].argmax() == token for place, token in zip(places, answer, strict=True))


def assert_as_each_alone(questions, found, oracle):
    for question, scores in zip(questions, found, strict=True):
        expected = [one_by_one(oracle, question.context, answer) for answer in question.answers]
        assert [score.logprob for score in scores] == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
        assert [score.is_greedy for score in scores] == [is_greedy for _, is_greedy in expected]


@pytest.mark.parametrize(("micro_batch_tokens", "max_logits"), [(1, 2**30), (12, 280 * 2), (20, 2**30), (4096, 2**30)])
def test_answers_that_share_a_context_score_as_each_alone(model, oracle, micro_batch_tokens, max_logits, monkeypatch):
    monkeypatch.setitem(scoring.MAX_LOGITS, "cpu", max_logits)  # few: the head takes slices
    found = score_questions([model], QUESTIONS, micro_batch_tokens=micro_batch_tokens, max_positions=192)
    assert_as_each_alone(QUESTIONS, found, oracle)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("back_end", attention.BACK_ENDS)
def test_every_back_end_of_attention_gives_the_same_scores(back_end, window, tmp_path, monkeypatch):
    """With heads of 16, as the compiled attention takes them, two queries to a key."""
    config = MistralConfig(
        vocab_size=280, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=48, initializer_range=0.4, max_position_embeddings=192, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(0)
    oracle = MistralForCausalLM(config).eval()
    oracle.save_pretrained(tmp_path)
    monkeypatch.setattr(attention, "back_end_of", lambda query: back_end)
    monkeypatch.setattr(attention, "attend_within", bottom_right)
    found = score_questions([load(tmp_path)], QUESTIONS, micro_batch_tokens=100, max_positions=192)
    assert_as_each_alone(QUESTIONS, found, oracle)


def test_a_model_whose_numbers_are_not_finite_is_refused_and_has_no_score(model):
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match="not finite"):
        score_questions([model], QUESTIONS, micro_batch_tokens=20, max_positions=192)


def test_the_likeliest_tokens_are_greedy(model, oracle):
    context, answer = [5, 6, 7], []
    with torch.no_grad():
        for _ in range(3):
            answer.append(int(oracle(torch.tensor([context + answer])).logits[0, -1].argmax()))
    other = (answer[0], answer[1], (answer[2] + 1) % 280)
    question = Question((5, 6, 7), (tuple(answer), other))
    ((right, wrong),) = score_questions([model], [question], micro_batch_tokens=64, max_positions=9)
    assert (right.is_greedy, wrong.is_greedy) == (True, False)


def test_a_context_that_is_too_long_loses_its_beginning(model, oracle):
    long, too_long = Question(tuple(range(20, 40)), ((50, 51),)), Question((1,), (tuple(range(20, 31)),))
    ((score,),) = score_questions([model], [long], micro_batch_tokens=1, max_positions=10)
    assert score.logprob == pytest.approx(one_by_one(oracle, range(31, 40), (50, 51))[0], abs=1e-4)
    with pytest.raises(ConfigError, match="11 tokens"):
        score_questions([model], [too_long], micro_batch_tokens=1, max_positions=10)


def test_batches_that_several_devices_share_are_scored_as_by_one(model):
    other = copy.deepcopy(model)
    seen = set()
    for one in (model, other):
        one.register_forward_pre_hook(lambda module, inputs: seen.add(id(module)) or time.sleep(0.01))
    settings, done = {"micro_batch_tokens": 1, "max_positions": 192}, []
    alone = score_questions([model], QUESTIONS * 3, **settings)
    shared = score_questions([model, other], QUESTIONS * 3, **settings, on_batch=lambda number, _: done.append(number))
    assert shared == alone
    assert seen == {id(model), id(other)} and done == sorted(set(done)) and done[-1] == 15


def test_a_batch_holds_as_many_tokens_as_it_may_without_padding_and_a_longer_question_goes_alone(model):
    lengths = [3] * 9 + [5] * 4 + [40]
    questions = [Question((number,) + (7,) * (length - 1), ((8,),)) for number, length in enumerate(lengths)]
    shapes = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    score_questions([model], questions, micro_batch_tokens=19, max_positions=192)
    assert shapes == [(1, 40), (1, 19), (1, 18), (1, 10)]


def test_questions_behind_the_same_examples_read_them_once_a_batch_and_score_as_each_alone(model, oracle):
    """24 tokens of a question alone, 20 of them examples: more than a batch, so that others that share most come
    along, as long as they add no more than half a batch: two of 4."""
    examples = tuple(range(40, 60))
    questions = [Question((*examples, number, 7, 8), ((9, 10), (11,))) for number in range(100, 104)]
    shapes = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    found = score_questions([model], questions, micro_batch_tokens=16, max_positions=192)
    assert shapes == [(1, 32), (1, 24)]
    assert_as_each_alone(questions, found, oracle)


@pytest.mark.parametrize("worth_sharing", [1, 3])
def test_every_beginning_is_read_once_and_each_token_predicted_behind_its_own(worth_sharing, monkeypatch):
    """A beginning of fewer tokens than are worth sharing is read again by each question."""
    monkeypatch.setattr(scoring, "WORTH_SHARING", worth_sharing)
    draw = random.Random(0)

    def drawn(longest):
        return tuple(draw.choices([1, 2, 3], k=draw.randint(1, longest)))

    for _ in range(100):
        contexts = sorted(drawn(6) for _ in range(draw.randint(1, 8)))
        questions = [Question(context, tuple({drawn(4) for _ in range(draw.randint(1, 3))})) for context in contexts]
        batch = batch_of(list(enumerate(questions)))
        asked = [
            ((*question.context, *answer[:number]), token)
            for question in questions
            for answer in question.answers
            for number, token in enumerate(answer)
        ]
        beginnings = {text[:end] for text, _ in asked for end in range(1, len(text) + 1)}
        assert batch.num_tokens == len(beginnings) if worth_sharing == 1 else batch.num_tokens >= len(beginnings)
        read, seen = {}, []  # what stands at and before each place; of each sequence all that it sees
        for start, length, behind in batch.sequences.tolist():
            before = seen[behind] if behind >= 0 else ()
            seen.append(before + tuple(batch.ids[start : start + length].tolist()))
            for number in range(length):
                read[start + number] = seen[-1][: len(before) + number + 1]
        assert [len(read[place]) - 1 for place in range(batch.num_tokens)] == batch.positions.tolist()
        pairs = zip(batch.predict_at.tolist(), batch.targets.tolist(), strict=True)
        assert [(read[place], token) for place, token in pairs] == asked


def test_what_all_answers_begin_with_is_read_once_and_the_last_layer_is_computed_where_it_predicts(model):
    """Of a context of 3 and two answers of 4 that differ in their third token: 3 + 2 + 2 * 1 tokens are read, and the
    last 5 of them predict."""
    read, predicting = [], []
    first, last = model.model.layers[0], model.model.layers[-1]
    first.register_forward_hook(lambda module, inputs, output: read.append(tuple(output.shape)))
    last.register_forward_hook(lambda module, inputs, output: predicting.append(tuple(output.shape)))
    question = Question((5, 6, 7), ((8, 9, 10, 11), (8, 9, 13, 14)))
    score_questions([model], [question], micro_batch_tokens=64, max_positions=192)
    assert question.num_tokens == 7 and read == [(1, 7, 32)] and predicting == [(1, 5, 32)]
