"""`model:FOLDER`: the score that a sequence classifier gives. The one reward that imports torch, in its own process."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from nanodag.data.records import message_text
from nanodag.errors import ConfigError
from nanodag.model.architecture import MODEL_CODE, cpu_layer_fits, read_json
from nanodag.own_code.user_frame import with_place
from nanodag.registry import entry
from nanodag.rewards.reward import Reward
from nanodag.tokenizer.chat import end_ids
from nanodag.tokenizer.steps import SEPARATOR, step_ids, steps_in

BATCH_TOKENS = 16_384
OF_STEPS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean, "min": min, "last": lambda scores: scores[-1], "product": math.prod
}  # fmt: skip


@entry("reward", "model", argument="folder")
class RewardModel:
    """A Hugging Face directory of a sequence classifier with its tokenizer, in float32. threads, device: that it
    computes on. steps: what becomes of the scores of steps, where it was trained to judge these.

    Answers that wait together are packed, each prompt once, where our own layers compute the model and it has one
    label. On a CPU these round a row as they do without its neighbours, where their widths fit layer.c, so a score has
    the same bits whoever shares its batch. Other models score one sample at a time.

    With one label the score is the logit, with two the probability of label 1. Raises ValueError for more labels.
    """

    def __init__(
        self,
        folder: str,
        *,
        threads: int = 1,
        device: str = "cpu",
        steps: Literal["mean", "min", "last", "product"] = "min",
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(threads)
        if not Path(folder, "config.json").is_file():
            raise ImportError(f"{folder} is no Hugging Face directory: it has no config.json")
        self._torch, self._device, self._steps = torch, device, OF_STEPS[steps]
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Of the turn, where the score was learned; a tokenizer's eos may differ.
        self._end = end_ids(Path(folder))[:1] if self._tokenizer.chat_template is not None else ()
        config = read_json(Path(folder, "config.json"))
        self._separator = config.get(SEPARATOR, "")
        self._longest = config.get("max_position_embeddings", math.inf)
        self._own = _own_model(Path(folder), config, device)
        if self._own is not None:
            self._own.to(device).eval()
            return
        self._model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
        self._model.to(device).eval()
        if (num_labels := self._model.config.num_labels) not in (1, 2):
            raise ImportError(f"the model in {folder} has {num_labels} labels; 1 or 2 are understood")

    def score_batch(self, samples: Sequence[tuple[Mapping[str, Any], str]]) -> list[Reward | str]:
        """The score of each completion as the assistant's answer, or why there is none, as for one that is too long.
        Special tokens that a completion spells out are plain text: it cannot end its own turn and praise itself in the
        next."""
        asked = [self._fitting(prompt, completion) for prompt, completion in samples]
        with self._torch.inference_mode():
            scores = iter(self._scores([one for one in asked if not isinstance(one, str)]))
        return [one if isinstance(one, str) else Reward(next(scores)) for one in asked]

    def _fitting(self, prompt: Mapping[str, Any], completion: str) -> tuple[list[int], list[int]] | str:
        try:
            ids, places = self._asked(prompt, completion)
        except Exception as error:  # noqa: BLE001 - a prompt that a chat template refuses fails no other
            return with_place(error)
        if len(ids) > self._longest:
            return f"prompt and completion are {len(ids)} tokens; the reward model takes {self._longest}"
        return ids, places

    def _asked(self, prompt: Mapping[str, Any], completion: str) -> tuple[list[int], list[int]]:
        """Ids of prompt and completion, and the places whose scores are read."""
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            begun = tokenizer("\n".join(map(message_text, prompt["messages"])) + "\n")["input_ids"]
        else:
            messages = [{"role": turn["role"], "content": message_text(turn)} for turn in prompt["messages"]]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            begun = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = steps_in(completion, self._separator) if self._separator else [completion]
        encoded = [tokenizer(p, add_special_tokens=False, split_special_tokens=True)["input_ids"] for p in pieces]
        return step_ids(begun, encoded, self._end)

    def _scores(self, asked: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        if self._own is None:
            scores = [self._alone(ids, places) for ids, places in asked]
        else:
            from nanodag.model.scoring import scores_at

            scores = scores_at(self._own, asked, batch_tokens=BATCH_TOKENS)
        if not self._separator:
            return [score for (score,) in scores]
        return [self._steps([1 / (1 + math.exp(-max(score, -500))) for score in of_steps]) for of_steps in scores]

    def _alone(self, ids: list[int], places: list[int]) -> list[float]:
        row = self._torch.tensor([ids], device=self._device)
        model: Any = self._model
        if self._separator:  # the class reads the last place alone
            return list(model.score(model.base_model(input_ids=row)[0])[0, places, 0].tolist())
        logits = model(input_ids=row).logits[0].float()
        return [float(logits[0] if len(logits) == 1 else logits.softmax(-1)[1])]


def _own_model(folder: Path, config: Mapping[str, Any], device: str) -> Any:
    """The reward model in a folder over our own layers; None where these do not compute it, or would round a row by
    its neighbours."""
    from nanodag.model.folder import load

    is_scorer = str(config.get("architectures")).endswith("ForSequenceClassification']")
    if not is_scorer or len(config.get("id2label", "01")) != 1 or config.get(MODEL_CODE, "own") != "own":
        return None
    try:
        model = load(folder, scores=True)
    except ConfigError:
        return None
    of = model.architecture
    is_exact = cpu_layer_fits(width=of.hidden_size, head_dim=of.head_dim, mlp_width=of.intermediate_size)
    return model if is_exact or device != "cpu" else None
