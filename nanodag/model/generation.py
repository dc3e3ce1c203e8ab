"""generation_config.json of a published model: the ids with which it begins, ends and pads. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanodag.model.architecture import read_json
from nanodag.tokenizer.chat import end_ids
from nanodag.tokenizer.encoding import Encoding

GENERATION_FILE = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def generation_config(tokenizer: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The generation_config.json that belongs to a tokenizer's folder: the one that is there, with the ids it lacks.

    config: of the model's config.json, whose ids hold where that file names none. eos_token_id is a list, to which the
    ids of `end_ids` are added. pad_token_id: where nobody names one, the first of these, as transformers takes it.
    """
    path = tokenizer / GENERATION_FILE
    settings = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    settings |= {name: value for name, value in (read_json(path) if path.exists() else {}).items() if value is not None}
    eos = settings.get("eos_token_id", [])
    ends = list(dict.fromkeys([*(eos if isinstance(eos, list) else [eos]), *end_ids(tokenizer)]))
    encoding = Encoding(tokenizer)
    bos, pad = encoding.named("bos_token"), encoding.named("pad_token")
    by_tokenizer = {"bos_token_id": bos, "pad_token_id": next(iter(ends), None) if pad is None else pad}
    named = {name: token_id for name, token_id in by_tokenizer.items() if token_id is not None}
    settings.pop("_from_model_config", None)  # with it transformers 4 takes config.json's ids instead
    return {**named, **settings, **({"eos_token_id": ends} if ends else {})}
