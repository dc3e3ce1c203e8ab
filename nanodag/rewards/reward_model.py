"""`model:FOLDER`: the score that a sequence classifier gives. The one reward that imports torch, in its own process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanodag.data.records import message_text
from nanodag.registry import entry
from nanodag.rewards.reward import Reward
from nanodag.tokenizer.chat import end_ids


@entry("reward", "model", argument="folder")
class RewardModel:
    """A Hugging Face directory of a sequence classifier with its tokenizer, on CPU in float32, one sample at a time so
    that a score does not depend on its neighbours.

    With one label the score is the logit, with two the probability of label 1. Raises ValueError for more labels.
    """

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(1)
        if not Path(folder, "config.json").is_file():
            raise ImportError(f"{folder} is no Hugging Face directory: it has no config.json")
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        # Of the turn, where the score was learned; a tokenizer's eos may differ.
        self._end = end_ids(Path(folder))[:1] if self._tokenizer.chat_template is not None else ()
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
        self._model = model.eval()
        if self._model.config.num_labels not in (1, 2):
            raise ImportError(
                f"the model in {folder} has {self._model.config.num_labels} labels; 1 or 2 are understood"
            )

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> Reward:
        """The score of the completion as the assistant's answer. Special tokens that the completion spells out are
        plain text: it cannot end its own turn and praise itself in the next. Raises ValueError when it is too long."""
        ids = self._ids(prompt, completion)
        longest = getattr(self._model.config, "max_position_embeddings", len(ids))
        if len(ids) > longest:
            raise ValueError(f"prompt and completion are {len(ids)} tokens; the reward model takes {longest}")
        with self._torch.inference_mode():
            logits = self._model(input_ids=self._torch.tensor([ids])).logits[0].float()
        score = logits[0] if len(logits) == 1 else logits.softmax(-1)[1]
        return Reward(float(score))

    def _ids(self, prompt: Mapping[str, Any], completion: str) -> list[int]:
        tokenizer = self._tokenizer
        answer = tokenizer(completion, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if tokenizer.chat_template is None:
            text = "\n".join(message_text(message) for message in prompt["messages"])
            return [*tokenizer(text + "\n")["input_ids"], *answer]
        messages = [{"role": turn["role"], "content": message_text(turn)} for turn in prompt["messages"]]
        begun = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = [*tokenizer(begun, add_special_tokens=False)["input_ids"], *answer]
        return [*ids, *self._end]
