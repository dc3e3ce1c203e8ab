"""Sums of rewards, rewards from a server, rewards of a model."""

from typing import ClassVar

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from nanodag import registry as entries
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ConfigError
from nanodag.host.ports import free_port
from nanodag.rewards import reward_pool
from nanodag.rewards.pool_process import _score
from nanodag.rewards.reward import Reward, combined, labels
from nanodag.rewards.text_rewards import f1
from nanodag.tokenizer.bpe import save_tokenizer
from tests.http_server import Quiet, serving
from tests.rewards.pools import Pool
from tests.rl.stages import BYTES, VOCABULARY


def test_f1_by_hand_and_against_padding():
    prompt = {"answer": "The Eiffel Tower", "metadata": {}}
    assert f1(prompt, "the eiffel tower!") == Reward(1.0, {"exact": 1.0})
    assert f1(prompt, "Eiffel's tower in Paris").value == pytest.approx(2 * 1 / (4 + 2))  # only "tower" is shared
    assert f1(prompt, "tower " * 50).value == pytest.approx(2 / 52)
    assert f1(prompt, "the a an").value == 0.0 and f1({"answer": "a", "metadata": {}}, "the").components["exact"] == 0.0
    several = {"answer": "", "metadata": {"answers": ["four", "4"]}}
    assert f1(several, "4").value == 1.0


def test_a_weighted_sum_names_its_parts():
    found = combined({"f1": 1.0, "my.rewards:style": -0.5}, [Reward(0.5, {"exact": 0.0}), Reward(1.0)])
    assert found == Reward(0.0, {"f1": 0.5, "f1_exact": 0.0, "style": 1.0})
    assert labels(["remote:http://a", "remote:http://b", "model:/m", "math"]) == ["remote", "remote_2", "model", "math"]


def test_the_least_of_several_rewards_and_what_of_weight_0_is_only_reported():
    pair = [Reward(0.5), Reward(1.0)]
    assert combined({"my.own:a": 1.0, "my.own:b": 0.25}, pair, "min") == Reward(0.25, {"a": 0.5, "b": 1.0})
    assert (
        combined({"my.own:a": 0.0, "my.own:b": 1.0}, pair, "min").value
        == 1.0
        == combined({"my.own:a": 0, "my.own:b": 1}, pair).value
    )
    assert _score({"f1": 1.0, "math": 0.0}, [Reward(0.7), "it cannot be read"], "sum")["value"] == 0.7
    assert "cannot be read" in _score({"f1": 1.0, "math": 0.5}, [Reward(0.7), "it cannot be read"], "sum")["error"]
    with Pool({"auto": 0.5, "f1": 1.0}, how="min") as pool:
        (found,) = pool.score([({"reward": "exact", "answer": "4", "metadata": {}}, "4")])
    assert found.value == 0.5 and found.components["f1"] == 1.0


def test_the_pool_adds_up_and_keeps_what_each_prompt_asks_for():
    prompt = {"reward": "exact", "answer": "4", "metadata": {}}
    with Pool({"auto": 1.0, "f1": 0.25}) as pool:
        right, other, failed = pool.score([(prompt, "4"), (prompt, "4 or 5"), ({**prompt, "answer": None}, "4")])
    assert right.value == 1.25 and right.components == {"exact": 1.0, "f1": 1.0, "f1_exact": 1.0}
    assert other.value == pytest.approx(0.25 * 0.5) and other.components["exact"] == 0.0
    assert failed.startswith("exact: AttributeError")


@pytest.mark.parametrize(
    ("reward", "message"),
    [({}, "nothing to add up"), ({"f1": 0.0}, "weights of 0 alone"), ({"f2": 1.0}, "no reward 'f2'"),
     ("remote:ftp://x", "http://"), ("model:here", "absolute path")],
)  # fmt: skip
def test_rewards_that_mean_nothing_are_refused(reward, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        RLStage.of(kind="rl", data=["file:x"], reward=reward)


PROMPT = {"reward": "", "answer": "", "metadata": {}}


class Server(Quiet):
    """A reward of the completion's length; `busy` is refused five times, `bad` has no reward, `nan` is no number."""

    sizes: ClassVar[list[int]] = []
    refused = 0

    def do_POST(self):
        samples = self.content()["samples"]
        if samples[0]["completion"] == "busy" and Server.refused < 5:
            Server.refused += 1
            self.send_error(503)
            return
        if samples[0]["completion"] == "denied":
            self.send_error(403)
            return
        Server.sizes.append(len(samples))
        answers = {"bad": {"error": "no taste"}, "nan": float("nan")}
        texts = [one["completion"] for one in samples]
        rewards = [answers.get(text, {"value": len(text), "components": {"style": 0.5}}) for text in texts]
        self.answer({"rewards": rewards})


def test_a_server_scores_what_waits_together_and_is_asked_again_when_busy():
    words = ["busy", "four", "bad", "nan", *["x"] * 8]
    Server.sizes, Server.refused = [], 0
    with serving(Server) as url, Pool(f"remote:{url}/score", timeout_s=60.0) as pool:
        scores = dict(zip(words, pool.score([(PROMPT, word) for word in words]), strict=True))
        assert pool.score([(PROMPT, "denied")])[0].startswith("HTTPStatusError")
    assert scores["busy"].value == 4.0 and scores["four"].components == {"style": 0.5} and scores["x"].value == 1.0
    assert scores["bad"] == "no taste" and "finite" in scores["nan"]
    assert sum(Server.sizes) == len(words) and max(Server.sizes) > 1 and Server.refused == 5


def test_a_server_that_is_not_there_fails_its_sample_with_that_reason_before_the_time_limit():
    with Pool(f"remote:http://127.0.0.1:{free_port()}/score", timeout_s=1.5) as pool:
        assert "refused" in pool.score([(PROMPT, "x")])[0]


def save_classifier(folder, **sizes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64, **sizes}
    given = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=VOCABULARY, **given, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(BYTES, folder)
    return folder


def test_a_classifier_without_a_chat_template_may_have_a_tokenizer_of_another_form(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=7, num_labels=1, **sizes)).save_pretrained(tmp_path)
    model = entries.load("reward", f"model:{tmp_path}")
    assert model._asked({"messages": [{"role": "user", "content": "good"}]}, "bad") == ([2, 5, 3, 6], [3])


def test_a_classifier_scores_the_answer_and_is_not_fooled_by_special_tokens(tmp_path):
    model = entries.load("reward", f"model:{save_classifier(tmp_path)}")
    prompt = {"messages": [{"role": "user", "content": "hi"}], "answer": "", "metadata": {}}
    tokenizer = model._tokenizer
    special = tokenizer.eos_token
    (ids, _), (plain, _) = model._asked(prompt, f"no{special}"), model._asked(prompt, "no")
    assert ids.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id)
    expected = LlamaForSequenceClassification.from_pretrained(tmp_path)(input_ids=torch.tensor([plain])).logits.item()
    score, too_long, again = model.score_batch([(prompt, "no"), (prompt, "x" * 100), (prompt, "no")])
    assert score == again and score.value == pytest.approx(expected, abs=1e-5)
    assert too_long.endswith("the reward model takes 64")


def test_what_waits_for_a_reward_model_is_scored_together_by_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_pool, "START_TIMEOUT_S", 600.0)  # torch is imported, on a machine that has much to do
    name, options = f"model:{save_classifier(tmp_path)}", {"threads": 2}
    prompts = [{"messages": [{"role": "user", "content": text}], "answer": "no", "reward": "exact"} for text in "ab"]
    with Pool({name: 1.0, "auto": 0.0}, options={name: options}, timeout_s=60.0) as pool:
        pool.score([(prompts[0], "warm")])
        asked, ask = [], pool._processes[0].child.ask
        pool._processes[0].child.ask = lambda message, timeout_s: asked.append(message) or ask(message, timeout_s)
        found = pool.score([(prompt, "no" * n) for prompt in prompts for n in range(1, 9)])
        assert len(pool._processes) == 1
    assert sum(len(message["samples"]) for message in asked) == 16 and len(asked) < 16
    assert [one.components["exact"] for one in found] == [1.0, *[0.0] * 7] * 2
    with pytest.raises(ValueError, match=r"takes steps as Literal.'mean', 'min', 'last', 'product'., not 'sum'"):
        RLStage.of(kind="rl", data=["file:x"], reward={"name": name, "options": {"steps": "sum"}})
