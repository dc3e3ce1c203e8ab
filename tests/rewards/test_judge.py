"""A language model as a judge: what it is asked, what counts as a score, what is paid."""

from typing import Any, ClassVar

import pytest
import yaml
from tenacity import stop_after_attempt

from nanodag import registry as entries
from nanodag.config.kinds.rl import RLStage
from nanodag.errors import ConfigError
from nanodag.rewards.judge import JudgeFile, filled, read_judge, score_in
from nanodag.rewards.remote import post_json
from nanodag.run.build_stage import own_entries
from tests.http_server import Quiet, serving
from tests.rewards.pools import Pool

ASKED = "Q: {question}\nA: {reference}\nGiven: {response}\n"


class Endpoint(Quiet):
    """Scores an answer by its length, up to 10; `mute` gets no score, `cut` a reply that was cut."""

    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = self.content()
        type(self).asked.append((self.path, self.headers.get("Authorization"), body))
        given = body["messages"][-1]["content"].partition("Given: ")[2].strip()
        reply = "I will not say." if given == "mute" else f"It has {len(given)} letters.\nScore: {min(10, len(given))}"
        choice = {"message": {"content": reply}, "finish_reason": "length" if given == "cut" else "stop"}
        self.answer({"choices": [choice], "usage": {"prompt_tokens": 1000, "completion_tokens": 100}})


def write(tmp_path, address, **others):
    file = tmp_path / "judge.yaml"
    file.write_text(yaml.safe_dump({"url": f"{address}/v1", "model": "m", "prompt": ASKED, **others}))
    return f"judge:{file}"


PROMPT = {
    "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2?"}],
    "answer": "4",
    "metadata": {},
}


def test_a_judge_is_asked_with_question_reference_and_answer_and_tells_its_price(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    Endpoint.asked.clear()
    with serving(Endpoint) as url:
        name = write(
            tmp_path, url, system="Be strict.", key_file=str(tmp_path / "key"), price={"input": 2.0, "output": 10.0}
        )
        with Pool(name) as pool:
            first, mute, cut = pool.score([(PROMPT, "four!"), (PROMPT, "mute"), (PROMPT, "cut")])
    assert first.value == 0.5 and first.components == {"price": 0.003}
    assert "0 lines of the reply begin with 'Score:'" in mute
    assert "raise max_tokens" in cut
    path, key, body = next(one for one in Endpoint.asked if "four!" in one[2]["messages"][-1]["content"])
    assert (path, key, body["temperature"]) == ("/v1/chat/completions", "Bearer secret", 0.0)
    system, asked = body["messages"]
    assert system["content"] == "Be strict." and asked["content"] == "Q: 2+2?\nA: 4\nGiven: four!\n"
    assert len(Endpoint.asked) == 3


def test_a_judge_that_is_lost_when_it_is_loaded_fails_samples_until_it_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr(post_json.retry, "stop", stop_after_attempt(1))
    with serving(Endpoint) as url:
        name = write(tmp_path, url)
    judge = entries.load("reward", name)
    (lost,) = judge.score_batch([(PROMPT, "four")])
    assert isinstance(lost, str) and lost.startswith("the judge m: ") and "refused" in lost
    with serving(Endpoint, port=int(url.rpartition(":")[2])):
        (found,) = judge.score_batch([(PROMPT, "four")])
    assert found.value == 0.4


def test_what_an_answer_spells_in_braces_is_not_filled_in():
    values = {"question": "{response}", "conversation": "", "reference": "{question}", "response": "r {reference}"}
    assert filled("{question}|{reference}|{response}|{other}", values) == "{response}|{question}|r {reference}|{other}"


@pytest.mark.parametrize(
    ("reply", "score"),
    [("Score: 10", 1.0), ("why\nScore: 2.5", 0.25), ("Score: 3\nScore: 9", None), ("Score: 11", None),
     ("Score: nan", None), ("Score: 7/10", None), ("the Score: 7", None), ("", None), ("Score: -1", None)],
)  # fmt: skip
def test_only_one_plain_number_in_range_on_a_line_of_its_own_is_a_score(reply, score):
    file = JudgeFile(url="http://h/v1", model="m", prompt="{response}")
    if score is None:
        with pytest.raises(ValueError):
            score_in(reply, file)
    else:
        assert score_in(reply, file) == score


@pytest.mark.parametrize(
    ("change", "message"),
    [({"prompt": "grade it"}, "no {response}"), ({"lowest": 10.0}, "below highest"), ({"url": "ftp://x"}, "url"),
     ({"colour": 1}, "colour"), ({"label": " "}, "label")],
)  # fmt: skip
def test_a_file_without_sense_is_refused_by_its_field(tmp_path, change, message):
    name = write(tmp_path, "http://h", **change)
    with pytest.raises(ConfigError, match=message):
        read_judge(name.removeprefix("judge:"))


def test_the_key_of_a_stage_knows_the_file_by_its_content_and_a_relative_path_is_refused(tmp_path):
    name = write(tmp_path, "http://h")
    stage = RLStage.of(kind="rl", data=["file:x"], reward=name)
    before = own_entries(stage)
    write(tmp_path, "http://h", model="other")
    assert list(before) == [name] and own_entries(stage) != before
    with pytest.raises(ValueError, match="absolute path of a file"):
        RLStage.of(kind="rl", data=["file:x"], reward="judge:judge.yaml")


def test_the_key_of_a_stage_knows_a_reward_model_by_its_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    stage = RLStage.of(kind="rl", data=["file:x"], reward=f"model:{tmp_path}")
    keys = []
    for weights in (b"one", b"other"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        keys.append(own_entries(stage)[f"model:{tmp_path}"])
    assert keys[0] != keys[1]
