"""A model that somebody serves under the OpenAI API: chats go to /chat/completions, plain texts to /completions."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from nanodag.config.kinds.evaluation import EndpointConfig, ThinkingConfig
from nanodag.errors import ConfigError, NanodagError, ServerBusy
from nanodag.evaluation.evaluated_model import CutScore, EvaluatedModel, Progress
from nanodag.evaluation.results import Answer, answer_of
from nanodag.inference.protocol import SamplingParams
from nanodag.rewards.judge import reply_of
from nanodag.rewards.remote import may_pass, post_json
from nanodag.store.kept_lines import content_key

MAX_SEED = (1 << 31) - 1  # some servers take no more bits
TOO_LONG = re.compile(r"(?i)context.{0,12}(length|size|window)")  # a refusal of a prompt that leaves no room


class EndpointModel(EvaluatedModel):
    """A served model, which has no folder and no tokenizer (nanodag.evaluation.forms.check_served)."""

    tokenizer_name = "endpoint"
    _stop_ids: Any = ()

    def __init__(self, endpoint: EndpointConfig, max_new_tokens: int, on_progress: Progress) -> None:
        LM.__init__(self)
        self.max_new_tokens, self.on_progress = max_new_tokens, on_progress
        self._endpoint, self._headers = endpoint, endpoint.headers()
        self._client = httpx.Client(timeout=endpoint.patience_s, headers=self._headers)

    def close(self) -> None:
        self._client.close()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as JSON. Raises ConfigError for a form that begins the answer itself."""
        if not add_generation_prompt:
            raise ConfigError("A form with gen_prefix begins the answer, which an endpoint cannot; use one without.")
        return json.dumps(chat_history, ensure_ascii=False)

    def answers(
        self, prompts: Sequence[str], params: Sequence[SamplingParams], tags: ThinkingConfig | None
    ) -> list[Answer]:
        """As of EvaluatedModel. After a failure no more is asked; what is under way is waited for, and kept."""
        answers: list[Answer] = []
        with ThreadPoolExecutor(self._endpoint.at_once) as threads:
            for sampling, reply in zip(params, threads.map(self._reply, prompts, params), strict=True):
                text, thinking, ending, num_read, num_written = reply
                answers.append(answer_of(text, ending=ending, tags=tags, stops=sampling.stop or ()))
                answers[-1].thinking = thinking or answers[-1].thinking
                self.tokens_read += num_read
                self.tokens_written += num_written
                self.on_progress(len(answers), len(prompts))
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Scores of answers behind their contexts, as texts; whoever serves the model makes tokens of them. Raises
        ConfigError for a server that does not score a prompt."""
        texts = [request.args for request in requests]
        scores: dict[tuple[str, str], tuple[float, bool]] = {}
        with ThreadPoolExecutor(self._endpoint.at_once) as threads:
            for pair, (score, is_greedy, num_read) in zip(once := dict.fromkeys(texts), threads.map(self._score, once)):
                scores[pair] = CutScore((0.0, False)) if score is None else (score, is_greedy)
                self.tokens_read += num_read
                self.on_progress(len(scores), len(once))
        return [scores[pair] for pair in texts]

    def _score(self, pair: tuple[str, str]) -> Sequence[Any]:
        """The answer's log-probability, None of too long a context; whether it is greedy; tokens that were read."""
        context, whole = len(pair[0]), "".join(pair)
        body = {"model": self._endpoint.model, "prompt": whole, "max_tokens": 1, "temperature": 0.0}

        def read(answer: Any) -> Sequence[Any]:
            try:
                told = answer["choices"][0]["logprobs"]
                names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                places = zip(*(told[name] for name in names), strict=True)
                # A token that spells the end of the context too is the answer's.
                own = [(p, top) for t, p, top, start in places if start < len(whole) and start + len(t) > context]
                logprobs, is_greedy = [float(p) for p, _ in own], all(p >= max(top.values()) for p, top in own)
                if not own or min(told["text_offset"]) < 0:  # as SGLang's, which are all -1
                    raise ValueError("text_offset")
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"gives no log-probabilities of a prompt (echo, logprobs): {error!r:.100}") from error
            return math.fsum(logprobs), is_greedy, len(told["tokens"]) - 1

        return self._asked("completions", {**body, "echo": True, "logprobs": 1}, read, (None, False, 0))

    def _reply(self, prompt: str, params: SamplingParams) -> Sequence[Any]:
        """The reply to a prompt, as reply_of has it."""
        path = "chat/completions" if self.is_chat else "completions"
        return self._asked(path, self._body(prompt, params), reply_of, ("", "", "too_long", 0, 0))

    def _asked(
        self, path: str, body: Mapping[str, Any], read: Callable[[Any], Sequence[Any]], too_long: Sequence[Any]
    ) -> Sequence[Any]:
        """A server's answer as it is read: the one that was kept, or a new one, which is kept."""
        key, url = content_key("endpoint", body), f"{self._endpoint.url}/{path}"
        if self.kept is not None and (kept := self.kept.get(key)) is not None:
            return list(kept)
        reply = too_long
        try:
            reply = read(post_json(self._client, url, body, patience_s=self._endpoint.patience_s))
        except (httpx.HTTPError, ValueError) as error:
            response = error.response if isinstance(error, httpx.HTTPStatusError) else None
            if response is None or response.status_code not in (400, 413, 422) or not TOO_LONG.search(response.text):
                raise self._failure(url, error, response) from error
        if self.kept is not None:
            self.kept.add({key: reply})  # one write, so that threads do not mix their lines
        return reply

    def _body(self, prompt: str, params: SamplingParams) -> dict[str, Any]:
        """A request. What not every server knows stands in it only where it says something."""
        body: dict[str, Any] = {"messages": json.loads(prompt)} if self.is_chat else {"prompt": prompt}
        body |= {"model": self._endpoint.model, "max_tokens": params.max_new_tokens, "temperature": params.temperature}
        body |= {"top_p": params.top_p} if params.top_p < 1 else {}
        body |= {"top_k": params.top_k} if params.top_k > 0 else {}
        body |= {"stop": list(params.stop)} if params.stop else {}
        body |= {"seed": params.sampling_seed & MAX_SEED} if params.sampling_seed is not None else {}
        return body | ({"chat_template_kwargs": dict(self._switches)} if self._switches else {})

    def _failure(self, url: str, error: Exception, response: httpx.Response | None) -> NanodagError:
        """The error to raise for a request that failed at last. What the server said is shown without the key."""
        said = f"{type(error).__name__} {error}" if response is None else f"{response.status_code} {response.text}"
        for header in self._headers.values():
            said = said.replace(header.removeprefix("Bearer "), "(the key)")
        what = f"POST {url} failed: {' '.join(said.split())[:400]}."
        if may_pass(error):
            return ServerBusy(f"{what} Look whether the server is up; lower endpoint.at_once, or raise its patience_s.")
        return ConfigError(f"{what} Correct endpoint.url, model or key, or what the benchmark asks for.")
