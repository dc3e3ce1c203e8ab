import json
import math
import random
import shutil

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from nanodag.config.kinds.evaluation import BenchmarkConfig
from nanodag.data.adapters import open_adapter
from nanodag.data.config import SourceConfig
from nanodag.data.question_form import asking
from nanodag.errors import ConfigError, SourceError
from nanodag.evaluation import benchmark_functions, writing
from nanodag.evaluation.evaluated_model import EvaluatedModel
from nanodag.evaluation.forms import FORMS
from nanodag.evaluation.harness import run_benchmark
from nanodag.evaluation.results import Answer
from nanodag.inference.protocol import SamplingParams
from nanodag.store.kept_lines import KeptLines
from nanodag.tokenizer.chat import load_renderer
from tests.data.rows import GSM8K, GSM8K_TEXTS, write_rows
from tests.evaluation.scripted import Scripted
from tests.evaluation.tiny import ONE_EMBEDDED, asked_by
from tests.rewards.pools import Pool


@pytest.fixture
def run(tmp_path):
    """run(model, name, rows, chat=..., **benchmark) -> BenchmarkResult"""

    def made(model, name, lines, *, chat=False, fewshot=None, adapter="auto", options=None, kept=None, **benchmark):
        def source(label, wanted):
            return {"url": write_rows(tmp_path / f"{label}.jsonl", wanted), "adapter": adapter}

        items = source("items", lines) | (options or {})
        if fewshot:
            benchmark["fewshot"] = source("fewshot", fewshot)
        config = BenchmarkConfig(name=name, source=items, **benchmark)
        forms = tmp_path / "forms"
        forms.mkdir(exist_ok=True)
        model.kept = kept
        return run_benchmark(model, config, chat=chat, seed=0, mirror="", folder=forms)

    return made


def scores_of(result, metric):
    return [record["scores"][metric] for record in result.records]


@pytest.mark.parametrize(("chat", "exact"), [(False, [1, 0, 0, 1, 0]), (True, [1, 0, 1, 0, 0])])
def test_gsm8k_takes_the_first_marked_number_as_a_text_and_in_chat_the_only_one_by_value(run, chat, exact):
    texts = {f"<user>{word}" if chat else word: text for word, text in GSM8K_TEXTS.items()}
    result = run(Scripted(texts), "gsm8k", GSM8K, chat=chat)
    assert scores_of(result, "exact_match") == exact
    assert scores_of(result, "flexible") == [1, 1, 0, 0, 0]
    assert result.scores["exact_match"].value == 0.4
    assert (result.metric, result.is_chat) == ("exact_match", chat)


def test_problems_are_scored_by_their_own_verifier(run):
    lines = [{"question": f"P{n} :", "answer": "1 2 3"} for n in range(4)]
    texts = {"P0": "1 2 3", "P1": " 1 2 3\n", "P2": "1 2 3 4", "P3": ""}
    result = run(Scripted(texts), "sorting", lines, form="problems", adapter="problem")
    assert scores_of(result, "exact_match") == [1, 1, 0, 0]
    first = result.records[0]
    assert (first["prompt"], first["target"], first["output"]) == ("Question: P0 :\nAnswer:", "1 2 3", "1 2 3")


BOXED = {"instruction": "Asked: {question} In \\boxed{}, please.", "reward": "boxed_math"}
FOREIGN = {"columns": {"question": "problem", "answer": "solution"}}


def test_a_benchmark_asks_and_judges_as_the_same_source_does_in_rl(run):
    lines = [{"problem": one["question"], "solution": one["answer"]} for one in GSM8K]
    texts = {"Q1": "#### 24", "Q2": "\\boxed{1234}", "Q3": "\\boxed{5}", "Q4": "7", "Q5": "so \\boxed{8.0}"}
    model = Scripted(texts)
    switches = {"template_options": {"enable_thinking": False}}
    result = run(model, "g", lines, form="problems", adapter="gsm8k", chat=True, options=BOXED | FOREIGN | switches)
    assert model.asked[0] == "<user>Asked: Q1 ? In \\boxed{}, please.<assistant><enable_thinking False>"
    assert scores_of(result, "exact_match") == [0, 1, 0, 0, 1]
    # as RL has it
    source = SourceConfig(url="file:x", adapter="gsm8k", **BOXED, **FOREIGN)
    prompts = open_adapter(source.adapter, source.url, "prompt", {}, source.columns)
    records = [asking(source, "prompt")(prompts(number, line)) for number, line in enumerate(lines)]
    with Pool(timeout_s=60.0) as pool:  # `auto`
        judged = pool.score([(record, texts[f"Q{number}"]) for number, record in enumerate(records, start=1)])
    assert [one.value for one in judged] == scores_of(result, "exact_match")


def test_columns_rename_the_rows_of_a_form_that_reads_them_as_they_are(run):
    lines = [{"problem": one["question"], "solution": one["answer"]} for one in GSM8K]
    assert scores_of(run(Scripted(GSM8K_TEXTS), "gsm8k", lines, options=FOREIGN), "exact_match") == [1, 0, 0, 1, 0]


@pytest.mark.parametrize(("benchmark", "said"), [
    ({"name": "gsm8k", "options": BOXED}, "instruction .* means nothing to rows as they are; .* `form: problems`"),
    ({"name": "p", "form": "problems", "options": {"template_options": {"a": 1}}}, "put as plain text .*mean noth"),
])  # fmt: skip
def test_options_that_a_benchmark_would_not_look_at_are_refused(run, benchmark, said):
    with pytest.raises(ValueError, match=said):
        run(Scripted(), lines=GSM8K, adapter="gsm8k", **benchmark)


def test_a_switch_that_the_model_s_template_does_not_have_is_refused(model_folder):
    checkpoint = checkpoint_of(model_folder)
    with pytest.raises(SourceError, match="has no switch 'enable_thinking', which template_options names; it has none"):
        checkpoint.switch_template({"enable_thinking": False})


MMLU = [
    {"question": " Which? ", "choices": ["w", "x", "y", "z"], "answer": 2, "subject": "s"},
    {"question": "What?", "choices": ["a", "b", "c", "d"], "answer": 0, "subject": "s"},
]


def test_mmlu_in_chat(run):
    prompts = ["Which?\nA. w\nB. x\nC. y\nD. z\n", "What?\nA. a\nB. b\nC. c\nD. d\n"]
    in_chat = [f"<user>{prompt}Answer with one letter.<assistant>" for prompt in prompts]
    likeliest_a = {"A": -1.0, "B": -2.0, "C": -3.0, "D": -4.0}
    model = Scripted(logprobs={(p, a): v for p in in_chat for a, v in likeliest_a.items()})
    assert scores_of(run(model, "mmlu", MMLU, chat=True, adapter="mmlu"), "acc") == [0, 1]


def test_arc_scores_choices_as_continuations_also_for_chat_models(run):
    choices = {"text": ["sun", "snow"], "label": ["1", "2"]}
    arc = [{"id": str(n), "question": "Hot?", "choices": choices, "answerKey": "2"} for n in range(2)]
    prompt = "Question: Hot?\nAnswer:"
    # by sum "sun" is likelier, by character "snow": -2.9 / 3 < -3.6 / 4
    model = Scripted(logprobs={(prompt, " sun"): -2.9, (prompt, " snow"): -3.6})
    result = run(model, "arc_challenge", arc, chat=True)
    assert (result.metric, result.scores["acc_norm"].value, result.scores["acc"].value) == ("acc_norm", 1.0, 0.0)
    assert not result.is_chat


def test_bits_per_byte_weighs_documents_by_their_bytes(run):
    result = run(Scripted(), "bits_per_byte", [{"text": "four"}, {"text": "ééé"}])
    assert [record["weight"] for record in result.records] == [4, 6]
    assert result.scores["bits_per_byte"].value == pytest.approx(3.0)
    assert not result.higher_is_better


def test_an_unknown_form_is_named_with_those_there_are(run, tmp_path):
    with pytest.raises(ConfigError, match=r"no form 'gsm9k'.*gsm8k, humaneval"):
        run(Scripted(), "gsm9k", GSM8K)
    with pytest.raises(ConfigError, match="needs `source:`"):
        run_benchmark(Scripted(), BenchmarkConfig(name="gsm8k"), chat=False, seed=0, mirror="", folder=tmp_path)


ARC = [
    {
        "id": str(n),
        "question": f"the {word} sat on",
        "choices": {"text": ["the mat", "a dog", "the cat ran"], "label": ["A", "B", "C"]},
        "answerKey": "ABC"[n % 3],
    }
    for n, word in enumerate(["cat", "dog", "mat", "sat", "ran", "and", "after", "on", "the cat", "the dog"])
]


def greedy_params(**more) -> SamplingParams:
    return SamplingParams(max_new_tokens=12, temperature=0.0, **more)


def checkpoint_of(folder, *, replicas=1, max_batch=64, bos="auto", **more) -> EvaluatedModel:
    sampler = ONE_EMBEDDED.model_copy(update={"replicas": replicas, "max_batch": max_batch})
    return EvaluatedModel(folder, asked_by(micro_batch_tokens=96, max_new_tokens=12, bos=bos, sampler=sampler), **more)


def without_bos_in_front(folder, target):
    """The same model with a tokenizer that has a bos token and does not put it there, as SmolLM2's."""
    shutil.copytree(folder, target)
    layout = json.loads((target / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps({**layout, "post_processor": None}))
    return target


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_text_begins_with_bos_where_the_tokenizer_puts_it_as_in_lm_eval(model_folder, tmp_path, adds_bos, bos):
    folder = model_folder if adds_bos else without_bos_in_front(model_folder, tmp_path / "model")
    checkpoint = checkpoint_of(folder, bos=bos)
    start = checkpoint.tokenizer.bos_token_id
    assert start is not None
    ids = checkpoint.tok_encode("the cat")
    assert (ids[0] == start) == (adds_bos if bos == "auto" else bos == "always")
    assert ids.count(start) <= 1
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    add_bos_token = {"auto": None, "always": True, "never": False}[bos]
    if adds_bos or bos != "always":  # there lm-eval cannot
        hflm = HFLM(pretrained=model, tokenizer=checkpoint.tokenizer, add_bos_token=add_bos_token)
        assert hflm.tok_encode("the cat") == ids
        assert hflm.tok_encode("<|bos|>the cat") == checkpoint.tok_encode("<|bos|>the cat")
    assert checkpoint.tok_encode("the cat", add_special_tokens=False) == [i for i in ids if i != start]
    assert checkpoint.document("the cat")[0] == start


def test_bos_always_is_refused_where_the_tokenizer_has_none(model_folder, tmp_path):
    folder = without_bos_in_front(model_folder, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": None}))
    with pytest.raises(ConfigError, match=r"bos: always, and the tokenizer in .* names no bos_token; set bos: auto"):
        checkpoint_of(folder, bos="always")


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_results_equal_lm_evals_own_model_class_and_a_computation_by_hand(run, models, tmp_path, kind):
    seen = []
    checkpoint = checkpoint_of(models[kind], on_progress=lambda done, total: seen.append((done, total)))
    result = run(checkpoint, "arc_easy", ARC)
    assert seen[-1] == (10, 10) and seen == sorted(seen)
    # lm-eval's HFLM on the same task
    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32).eval()
    hflm = HFLM(pretrained=model, tokenizer=checkpoint.tokenizer, batch_size=3)
    task = TaskManager(include_path=str(tmp_path / "forms"), include_defaults=False).load(["arc_easy"])
    theirs = evaluate(hflm, task, bootstrap_iters=10)["results"]["arc_easy"]
    for metric in ("acc", "acc_norm"):
        assert result.scores[metric].value == pytest.approx(theirs[f"{metric},none"])
        assert result.scores[metric].stderr == pytest.approx(theirs[f"{metric}_stderr,none"])
    # and from the logits
    for row, record in zip(ARC, result.records, strict=True):
        found = []
        for choice in row["choices"]["text"]:
            prompt = f"Question: {row['question']}\nAnswer:"
            start = len(checkpoint.tokenizer.encode(prompt))
            ids = checkpoint.tokenizer.encode(f"{prompt} {choice}")
            assert ids[0] == checkpoint.tokenizer.bos_token_id
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            found.append(sum(logprobs[i - 1, ids[i]].item() for i in range(start, len(ids))))
        assert record["logprobs"] == pytest.approx(found, abs=1e-3)
        assert record["scores"]["acc"] == float("ABC"[found.index(max(found))] == row["answerKey"])


def test_bits_per_byte_equals_the_logits_of_whole_documents(run, model_folder):
    texts = ["the cat sat", "a dog ran after the cat on the mat", "été"]
    checkpoint = checkpoint_of(model_folder)
    result = run(checkpoint, "bits_per_byte", [{"text": text} for text in texts])
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    for text, record in zip(texts, result.records, strict=True):
        ids = checkpoint.tokenizer.encode(text)  # with the start-of-document token
        with torch.no_grad():
            nats = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item() * (len(ids) - 1)
        assert record["scores"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-4)


def greedy(model, ids, stop_ids, limit):
    said = []
    with torch.no_grad():
        while len(said) < limit:
            token = int(model(torch.tensor([ids + said])).logits[0, -1].argmax())
            if token in stop_ids:
                break
            said.append(token)
    return said


WORDS = [{"question": f"{word}:", "answer": "the mat"} for word in ("cat", "dog", "mat", "sat on the", "ran")]
PROBLEMS = {"form": "problems", "adapter": "problem"}


@pytest.mark.parametrize("chat", [False, True])
def test_texts_are_the_models_greedy_ones_up_to_a_stop(run, model_folder, chat):
    checkpoint = checkpoint_of(model_folder)
    result = run(checkpoint, "p", WORDS, **PROBLEMS, chat=chat)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer, renderer = checkpoint.tokenizer, load_renderer(model_folder)
    for row, record in zip(WORDS, result.records, strict=True):
        # the prompt that SFT and RL train on
        ids = renderer.prompt([{"role": "user", "content": row["question"]}]) if chat else []
        ids = ids or tokenizer.encode(f"Question: {row['question']}\nAnswer:")
        said = greedy(model, ids, {tokenizer.eos_token_id, tokenizer.bos_token_id}, 12)
        assert record["output"] == tokenizer.decode(said, skip_special_tokens=True)


def outputs(result):
    return [[one["output"] for one in record.get("samples", [record])] for record in result.records]


def test_stop_strings_cut_the_text(run, model_folder):
    checkpoint = checkpoint_of(model_folder)
    whole = [text for (text,) in outputs(run(checkpoint, "p", WORDS, **PROBLEMS))]
    stop = next(text[2:4] for text in whole if len(text) > 4)
    cut = [text for (text,) in outputs(run(checkpoint, "p", WORDS, **PROBLEMS, stop=[stop]))]
    assert cut == [text.partition(stop)[0] for text in whole] != whole


def test_a_prompt_that_leaves_an_answer_no_room_is_not_asked_and_never_cut(model_folder, caplog):
    checkpoint = checkpoint_of(model_folder)  # 192 positions, 12 of them for the answer
    ids = checkpoint.tok_encode("the cat sat on the mat " * 30)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    stops = {checkpoint.tokenizer.eos_token_id, checkpoint.tokenizer.bos_token_id}
    said = checkpoint.tokenizer.decode(greedy(model, ids[:180], stops, 12), skip_special_tokens=True)
    assert said
    prompts = [ids, ids[:180], ids[:181]]
    written = checkpoint.write(prompts, [greedy_params()] * 3)
    assert [checkpoint._decode(ids) for ids, _ in written] == ["", said, ""]
    assert [ending for _, ending in written] == ["too_long", "length", "too_long"]
    assert checkpoint.tokens_read == 180
    assert "2 of 3 prompts are longer than 180 tokens, what max_new_tokens 12 leaves" in caplog.text


def test_items_whose_prompt_is_too_long_are_counted_and_wrong(run, model_folder):
    lines = [{"question": "the cat " * count, "answer": ""} for count in (2, 100, 3)]
    result = run(checkpoint_of(model_folder), "p", lines, **PROBLEMS)
    assert [record.get("too_long", False) for record in result.records] == [False, True, False]
    assert (result.records[1]["output"], result.as_json()["too_long"]) == ("", 1)


def test_choices_behind_a_context_that_lost_its_beginning_are_counted(run, model_folder):
    lines = [{**row, "question": row["question"] * (1 if row["id"] != "1" else 60)} for row in ARC]
    result = run(checkpoint_of(model_folder), "arc_easy", lines)
    assert [record["id"] for record in result.records if record.get("too_long")] == [result.records[1]["id"]]
    assert result.as_json()["too_long"] == 1


def test_the_context_is_that_of_the_longest_prompt_and_the_answer_in_whole_slots(model_folder):
    checkpoint = checkpoint_of(model_folder)
    contexts = []
    for length in (10, 52, 53, 180, 10):
        checkpoint.write([[5] * length], [greedy_params()])
        contexts.append(checkpoint._sampler.context)
    assert contexts == [64, 64, 128, 192, 192]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_two_replicas_write_what_one_does(models, monkeypatch, kind):
    alone = checkpoint_of(models[kind], replicas=2)
    prompts = [alone.tok_encode(f"{word} {other}") for word in ("the cat", "a dog sat on") for other in "abcdefgh"]
    params = [greedy_params(stop=("t",) if number % 3 == 0 else None) for number in range(len(prompts))]
    expected = alone.write(prompts, params)
    assert alone._sampler.num_replicas == 1, "so little is not worth a second one"
    monkeypatch.setattr(writing, "REPLICA_FLOPS", 1.0)
    seen = []
    both = checkpoint_of(models[kind], replicas=2, on_progress=lambda done, total: seen.append((done, total)))
    try:
        assert both.write(prompts, params) == expected
        assert both._sampler.num_replicas == 2
        assert seen == [(done, 16) for done in range(1, 17)]
    finally:
        replicas = both._sampler.fleet.replicas
        both.close()
    assert len(replicas) == 2 and not any(replica.server.is_alive for replica in replicas)


SAMPLED = {**PROBLEMS, "num_samples": 4, "temperature": 1.5, "top_p": 0.9, "top_k": 40}


def test_a_sample_depends_on_seed_item_and_number_and_on_nothing_that_is_beside_it(run, model_folder, monkeypatch):
    checkpoint = checkpoint_of(model_folder, replicas=2)
    lines = [*WORDS, WORDS[0]]  # a row that stands twice is two items
    base = run(checkpoint, "p", lines, **SAMPLED)
    samples = {record["id"]: record["samples"] for record in base.records}
    assert len(samples) == 6
    assert all(len({one["output"] for one in four}) > 1 for four in samples.values())
    assert outputs(base)[0] != outputs(base)[5]
    # others beside it, or fewer of them
    fewer = run(checkpoint, "p", lines[2:4], **SAMPLED | {"num_samples": 2})
    assert [record["samples"] for record in fewer.records] == [samples[record["id"]][:2] for record in fewer.records]
    # batches of one, or two samplers
    alone = checkpoint_of(model_folder, max_batch=1)
    assert run(alone, "p", lines, **SAMPLED).records == base.records
    monkeypatch.setattr(writing, "REPLICA_FLOPS", 1.0)
    try:
        assert run(checkpoint, "p", lines, **SAMPLED).records == base.records
        assert checkpoint._sampler.num_replicas == 2
    finally:
        checkpoint.close()
    assert outputs(run(alone, "p", lines, **SAMPLED | {"seed": 5})) != outputs(base)


def test_metrics_over_samples_of_known_answers(run):
    """Sample by sample: the fake counts how often it was asked each question."""
    said = {"Q1": ["#### 24", "#### 24", "24", "#### 2"], "Q2": ["?", "?", "so 1,234", "?"]}

    class InTurn(Scripted):
        def generate_until(self, requests):
            texts = []
            for request in requests:
                word = next(word for word in said if word in request.args[0].split())
                texts.append(said[word][self.asked.count(word)])
                self.asked.append(word)
            return [Answer(text, ending="length" if text == "?" else "stop") for text in texts]

    asked = {"num_samples": 4, "temperature": 1.0, "metrics": ["pass@2", "maj@4"]}
    result = run(InTurn(), "gsm8k", GSM8K[:2], **asked)
    assert [record["scores"] for record in result.records] == [
        {"pass@2": pytest.approx(5 / 6), "maj@4": 1.0, "avg@4": 0.5, "flexible": 0.75},
        {"pass@2": 0.0, "maj@4": 0.0, "avg@4": 0.0, "flexible": 0.25},
    ]
    told = result.as_json()
    assert (told["metric"], told["base_metric"], told["num_samples"]) == ("pass@2", "exact_match", 4)
    assert told["value"] == pytest.approx(5 / 12)
    assert (told["unparsed"], told["truncated"], told["too_long"]) == (5, 3, 0)
    assert str(result).endswith("2 items, 5 answers unparsed, 3 answers truncated")
    first = result.records[0]["samples"]
    assert first[0] == {"output": "#### 24", "parsed": "24", "scores": {"exact_match": 1.0, "flexible": 1.0}}
    assert first[2] == {"output": "24", "parsed": "", "scores": {"exact_match": 0.0, "flexible": 1.0}}


def test_answers_that_reach_their_limit_and_those_without_an_answer_are_counted_by_themselves(run, model_folder):
    checkpoint = checkpoint_of(model_folder)
    asked = {**PROBLEMS, "options": {"reward": "boxed_math"}}
    lines = [{"question": f"{word} the cat", "answer": "7"} for word in "abcdef"]
    whole = run(checkpoint, "p", lines, **asked, max_new_tokens=40)
    short = run(checkpoint, "p", lines, **asked, max_new_tokens=3)
    for (text,), (start,) in zip(outputs(whole), outputs(short), strict=True):
        assert text.startswith(start)
    ended = [not record.get("truncated") for record in short.records]
    assert short.counts == {"too_long": 0, "unparsed": 6, "truncated": 6 - sum(ended)}
    assert short.counts["truncated"] > whole.counts["truncated"]


def test_thinking_is_left_out_of_what_is_judged(run, model_folder):
    checkpoint = checkpoint_of(model_folder)
    whole = [text for (text,) in outputs(run(checkpoint, "p", WORDS, **PROBLEMS))]
    end = next(text[3:5] for text in whole if len(text) > 8)
    lines = [{**row, "answer": text.rpartition(end)[2]} for row, text in zip(WORDS, whole, strict=True)]
    result = run(checkpoint, "p", lines, **PROBLEMS, thinking={"begin": "never written", "end": end})
    expected = [text.rpartition(end)[2].lstrip() for text in whole]
    assert [text for (text,) in outputs(result)] == expected != whole
    assert scores_of(result, "exact_match") == [float(text.strip() != "") for text in expected]
    for text, record in zip(whole, result.records, strict=True):
        assert record.get("thinking", "") == text.rpartition(end)[0]


def test_tags_that_are_special_tokens_are_seen_in_what_was_written(model_folder):
    checkpoint = checkpoint_of(model_folder)
    start = checkpoint.tokenizer.bos_token
    ids = [*checkpoint.tok_encode("the cat", add_special_tokens=False), checkpoint.tokenizer.bos_token_id]
    assert checkpoint._decode([*ids, *ids]) == "the catthe cat"
    assert checkpoint._decode([*ids, *ids], keep=("none", start)) == f"the cat{start}the cat{start}"


def test_a_system_prompt_stands_before_that_of_the_item_and_worked_examples_are_turns(run):
    model = Scripted({"?<assistant>": "#### 24"})
    examples = [{"question": "QF ?", "answer": "#### 2"}]
    run(model, "gsm8k", GSM8K[:2], chat=True, system="Be brief.", num_fewshot=1, fewshot=examples)
    assert model.asked[0] == "<system>Be brief.<user>QF ?<assistant>#### 2<user>Q1 ?<assistant>"
    with pytest.raises(ConfigError, match=r"put as plain text .*; leave out its `system`"):
        run(model, "gsm8k", GSM8K[:2], system="Be brief.")


@pytest.mark.parametrize(
    ("setting", "value"), [("num_samples", 2), ("stop", ["a"]), ("thinking", {}), ("temperature", 1.0)]
)
def test_settings_of_written_answers_are_refused_where_likelihoods_are_scored(run, setting, value):
    given = {setting: value, "temperature": 1.0}
    with pytest.raises(ConfigError, match=r"'mmlu' is scored by likelihood, so its \w+ means nothing"):
        run(Scripted(), "mmlu", MMLU, **given)


def test_a_form_that_asks_for_sampling_is_not_answered_greedily(run, tmp_path):
    (tmp_path / "warm.yaml").write_text(
        f"include: {FORMS / 'gsm8k.yaml'}\ntask: warm\ngeneration_kwargs: {{do_sample: true, temperature: 0.6}}\n"
    )
    form = str(tmp_path / "warm.yaml")
    with pytest.raises(ConfigError, match=r"greedily, and warm.yaml asks for .* Set temperature: 0.6"):
        run(Scripted(GSM8K_TEXTS), "w", GSM8K, form=form)
    assert run(Scripted(GSM8K_TEXTS), "w", GSM8K, form=form, temperature=0.6).scores["exact_match"].value == 0.4
    (tmp_path / "warm.yaml").write_text(f"include: {FORMS / 'gsm8k.yaml'}\ntask: warm\nrepeats: 3\n")
    with pytest.raises(ConfigError, match=r"has repeats 3\. Name a form without, and set num_samples"):
        run(Scripted(GSM8K_TEXTS), "w", GSM8K, form=form)


def test_what_lm_eval_s_own_filters_find_nothing_in_is_unparsed(run):
    """Its own gsm8k, whose main filter is the number behind ####."""
    result = run(Scripted(GSM8K_TEXTS), "mine", GSM8K, form="lm_eval:gsm8k/gsm8k.yaml")
    assert [record["parsed"] for record in result.records] == ["24", "", "-5.0", "7", ""]
    assert result.counts == {"too_long": 0, "unparsed": 2, "truncated": 0}


class Killed(BaseException):
    """A kill."""


@pytest.mark.parametrize("benchmark", ["p", "arc_easy", "bits_per_byte"])
def test_a_benchmark_killed_again_and_again_asks_once_and_ends_the_same(run, model_folder, tmp_path, benchmark):
    asked = {
        "p": {"lines": [*WORDS, *({**row, "question": row["question"] * 2} for row in WORDS)], **SAMPLED},
        "arc_easy": {"lines": [{**row, "question": row["question"] * n} for n, row in enumerate(ARC, start=1)]},
        "bits_per_byte": {"lines": [{"text": "the cat sat " * n} for n in range(1, 16)]},
    }[benchmark]

    def attempt(kept, num_done):
        """The result, and how much was done before it ended; Killed behind num_done more."""
        seen = []

        def progress(done, total):
            seen.append(done)
            if len(seen) > num_done:
                raise Killed

        checkpoint = checkpoint_of(model_folder, on_progress=progress, max_batch=3)
        return run(checkpoint, benchmark, kept=kept, **asked), checkpoint, seen

    whole, undisturbed, _ = attempt(None, 10**6)
    path, kills, rng = tmp_path / "kept.jsonl", 0, random.Random(0)
    found = None
    while found is None:
        with KeptLines(path) as kept:
            try:
                found, checkpoint, _ = attempt(kept, rng.randrange(1, 4) + kills)
            except Killed:
                kills += 1
        num_kept = len(kept)
        assert len(path.read_bytes().splitlines()) == num_kept, "something was asked twice"
        with path.open("ab") as stream:  # and a line that was being written
            stream.write(b'00000000 {"half')
    assert kills >= 2
    assert found == whole
    assert (checkpoint.tokens_read, checkpoint.tokens_written) == (undisturbed.tokens_read, undisturbed.tokens_written)


def test_a_verdict_that_was_kept_is_not_made_again(run, tmp_path, monkeypatch):
    judged = []
    original = benchmark_functions.gsm8k_reward
    monkeypatch.setattr(
        benchmark_functions, "gsm8k_reward", lambda prompt, text: judged.append(text) or original(prompt, text)
    )
    texts = {f"<user>{word}": text for word, text in GSM8K_TEXTS.items()}
    with KeptLines(tmp_path / "kept.jsonl") as kept:
        first = run(Scripted(texts), "gsm8k", GSM8K, chat=True, kept=kept)
        again = run(Scripted(texts), "gsm8k", GSM8K, chat=True, kept=kept)
        assert (len(judged), again) == (5, first)
        run(Scripted({**texts, "<user>Q1": "#### 25"}), "gsm8k", GSM8K, chat=True, kept=kept)
    assert judged[5:] == ["#### 25"]
