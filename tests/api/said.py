"""Models whose engine answers by a word of the prompt, for clients that nobody here wrote, and what those ask."""

from collections.abc import Mapping
from pathlib import Path

from nanodag.api.application import application
from nanodag.errors import SamplerError
from nanodag.tokenizer import layout
from tests.api.scripted import Scripted, model_of

KEY = "a-key-of-24-characters-."
TEXT = "The cät sat."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "day": "today"}}\n</tool_call>'


class ByWord:
    """A Backend: of the scripted engines the first whose word is in the prompt."""

    def __init__(self, encoding, engines: Mapping[str, Scripted]):
        self._encoding, self._engines = encoding, engines
        self.asked = []
        self.is_ready, self.weight_version, self.num_restarts = True, "3", 0

    def answer(self, request, *, stream):
        self.asked.append(request)
        text = self._encoding.decode(request.input_ids)
        engine = next(engine for word, engine in self._engines.items() if word in text)
        return engine.answer(request, stream=stream)


def said_app(folder: Path, hermes_folder: Path, ids_of):
    """The application, its backends by the names of their models."""
    end = layout.END
    plain, hermes = model_of(folder, None), model_of(hermes_folder, None)
    engines = {
        "fail": Scripted(ids_of(TEXT, end), error=SamplerError("of this test"), error_at=2),
        "": Scripted(ids_of(TEXT, end)),
    }
    backends = {
        "plain": ByWord(plain.tokens.encoding, engines),
        "hermes": ByWord(
            hermes.tokens.encoding, {"rain": Scripted(ids_of("It is rain.", end)), "": Scripted(ids_of(CALL, end))}
        ),
    }
    models = {
        name: model_of(where, backends[name], name=name, context=2000)
        for name, where in (("plain", folder), ("hermes", hermes_folder))
    }
    return application(models, keys=[KEY]), backends
