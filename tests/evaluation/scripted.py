"""A model of lm-eval's that says what a test wrote down."""

import math

from lm_eval.api.model import LM


class Scripted(LM):
    """Says what it is told to: texts by a word of the prompt, log-probabilities by answer."""

    kept = None

    def __init__(self, texts=None, logprobs=None):
        super().__init__()
        self.texts, self.logprobs = texts or {}, logprobs or {}
        self.is_chat = False
        self.switches = {}
        self.asked = []

    def generate_until(self, requests):
        self.asked += [request.args[0] for request in requests]
        return [next(text for word, text in self.texts.items() if word in r.args[0].split()) for r in requests]

    def loglikelihood(self, requests):
        self.asked += [request.args for request in requests]
        return [(self.logprobs[request.args], False) for request in requests]

    def loglikelihood_rolling(self, requests):
        return [-math.log(2) * 3 * len(request.args[0].encode()) for request in requests]

    def switch_template(self, switches):
        self.switches = switches

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        switched = "".join(f"<{name} {value}>" for name, value in self.switches.items())
        return "".join(f"<{m['role']}>{m['content']}" for m in chat_history) + "<assistant>" + switched

    @property
    def tokenizer_name(self):
        return "scripted"
