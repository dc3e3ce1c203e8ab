"""Fakes of what a generator of rollouts works with: text, prompts and rewards that show their numbers."""

from concurrent.futures import Future

from nanodag.config.kinds.rl import RLStage
from nanodag.data.config import SourceConfig
from nanodag.data.mixture import Mixture
from nanodag.rewards.reward_pool import SampleReward
from nanodag.rl.rollouts.prompts import PromptCursor

STOP = 0


class FakeEncoding:
    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


class FakeRenderer:
    """A prompt's ids are its number, repeated as often as its text says."""

    stop_ids = (STOP,)

    def prompt(self, messages, switches=None) -> list[int]:
        number, length = messages[0]["content"].split("x")
        return [int(number) + 1] * int(length)


class FakePool:
    """The reward of an answer is the number that it spells; `?` fails."""

    def submit_group(self, prompt, completions, *, reported=()) -> "list[Future[SampleReward]]":
        return [self._score(completion) for completion in completions]

    def _score(self, completion) -> "Future[SampleReward]":
        future: Future[SampleReward] = Future()
        failed = completion == "?"
        future.set_result(SampleReward(None, {}, "no number") if failed else SampleReward(float(completion), {}))
        return future


def config(**values) -> RLStage:
    base = {"kind": "rl", "data": ["file:x.jsonl"], "seed": 5, "samples_per_prompt": 2, "prompts_per_step": 2}
    return RLStage.of(**(base | values))


def cursor_over(tmp_path, lengths: list[int], longest: int = 10, **more) -> PromptCursor:
    path = tmp_path / "prompts.jsonl"
    rows = [f'{{"prompt": "{n}x{length}", "answer": "", "prompt_id": "p{n}"}}\n' for n, length in enumerate(lengths)]
    path.write_text("".join(rows))
    mixture = Mixture([SourceConfig(url=f"file:{path}")], kind="prompt", seed=0, repeat=True, shuffle=False)
    return PromptCursor(mixture, FakeRenderer(), longest=longest, **more)


def ids(prompts) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]
