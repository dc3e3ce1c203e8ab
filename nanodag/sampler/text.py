"""A checkpoint's tokenizer, for prompts given as text, for the text of an answer, and for stop strings."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from nanodag.errors import BadRequest
from nanodag.inference.protocol import SamplingParams

SPARE_TOKENS = 4


class Text:
    """The tokenizer.json of a folder. Training never goes through here: its tokens stay tokens."""

    def __init__(self, path: Path) -> None:
        """Raises BadRequest if the file cannot be read."""
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        # The library raises a bare Exception for a malformed file.
        except Exception as error:
            raise BadRequest(f"{path} cannot be read as a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer adds of itself. Other threads go on meanwhile."""
        return self._tokenizer.encode_batch([text])[0].ids  # `encode` would keep the interpreter's lock

    def answer(self, ids: Sequence[int], params: SamplingParams, *, has_stop_token: bool) -> str:
        """The text of a sample, without the token that ended it unless ``no_stop_trim``."""
        return self._decode(ids[:-1] if has_stop_token and not params.no_stop_trim else ids, params)

    def matched_stop(self, ids: Sequence[int], params: SamplingParams) -> tuple[str, str] | None:
        """The text up to the first stop string in it (with it, if ``no_stop_trim``), and that string; None without. To
        be asked at every token: it looks only at the end first."""
        stops = params.stop or ()
        # A token is at least a byte, so what the last one completed lies within this many tokens of the end.
        reach = max(len(stop.encode()) for stop in stops) + SPARE_TOKENS
        tail = self._decode(ids[-reach:], params)
        if not any(stop in tail for stop in stops):
            return None
        text = self._decode(ids, params)
        matches = [(text.find(stop), stop) for stop in stops if stop in text]
        if not matches:
            return None
        place, stop = min(matches)
        return text[: place + (len(stop) if params.no_stop_trim else 0)], stop

    def _decode(self, ids: Sequence[int], params: SamplingParams) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=params.skip_special_tokens)
