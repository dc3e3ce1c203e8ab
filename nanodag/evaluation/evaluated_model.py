"""A checkpoint as lm-eval sees it: scores texts with the model that is trained, writes texts with samplers.

Either is loaded when a benchmark first needs it; the model classes of transformers, which take seconds to import, are
not. Plain text becomes the tokens that lm-eval's own HFLM makes of it: with the start-of-document token where the
tokenizer puts it there itself, unless the config says otherwise. A chat prompt is taken as its template renders it.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanodag.config.kinds.evaluation import BenchmarkConfig, EvalStage, ThinkingConfig
from nanodag.errors import ConfigError, SamplerError
from nanodag.errors.words import counted
from nanodag.evaluation.benchmark import sampling_params
from nanodag.evaluation.results import Answer, Ending, answer_of
from nanodag.evaluation.writing import InProcess, Replicas, SamplerSettings, replicas_for, start_sampler
from nanodag.inference.cache_size import slot_tokens
from nanodag.inference.engine_install import Device
from nanodag.inference.number_formats import DTYPES
from nanodag.inference.protocol import Completion, Request, SamplingParams
from nanodag.model import cpu_linear
from nanodag.model.architecture import read_checkpoint
from nanodag.model.decoder import Decoder
from nanodag.model.folder import CausalModel, load
from nanodag.model.headers import faults_of_config, matrix_parameters
from nanodag.model.scoring import AnswerScore, Question, score_questions
from nanodag.store.kept_lines import KeptLines, content_key
from nanodag.tokenizer.chat import Switches, check_switches

log = logging.getLogger(__name__)

KEPT_TEXTS = 64

Progress = Callable[[int, int], None]


class CutScore(tuple[float, bool]):
    """The score of an answer behind a context that was too long and lost its beginning, as in lm-eval's HFLM."""

    __slots__ = ()


class EvaluatedModel(TemplateLM):
    """A Hugging Face folder for lm-eval.

    is_chat: prompts come from the chat template. under_way: the benchmark, and the stage's seed. kept: what was written
    and scored for it before, and where more is kept. All three are set benchmark by benchmark. max_new_tokens: where
    the benchmark does not say. config: derived. on_progress gets (done, total) of the requests of the benchmark under
    way. tokens_read, tokens_written: counted from the start. Raises ConfigError for bos `always` where the tokenizer
    has none.
    """

    is_chat = False
    under_way: tuple[BenchmarkConfig, int] | None = None
    kept: KeptLines | None = None
    tokens_read = 0
    tokens_written = 0
    _switches: Mapping[str, Any] = {}
    _sampler: InProcess | Replicas | None = None

    def __init__(self, folder: Path, config: EvalStage, *, on_progress: Progress = lambda done, total: None) -> None:
        super().__init__()
        from transformers import AutoTokenizer

        self.folder, self.max_new_tokens, self.on_progress = folder, config.max_new_tokens, on_progress
        self._device = cast(Device, config.resources.device)
        how: dict[str, Any] = {"device": self._device, "threads": int(config.resources.threads)}
        self.sampler_settings = SamplerSettings(folder=folder, precision=config.precision, config=config.sampler, **how)
        self._micro_batch_tokens = int(config.micro_batch_tokens)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        with faults_of_config():
            self.max_positions = read_checkpoint(folder).architecture.max_positions
        self._bos = config.bos
        # lm-eval asks for a context's tokens once for each of its choices.
        self._encoded = lru_cache(maxsize=KEPT_TEXTS)(self._encode)
        if config.bos == "always" and self.tokenizer.bos_token_id is None:
            raise ConfigError(f"bos: always, and the tokenizer in {folder} names no bos_token; set bos: auto.")

    @cached_property
    def models(self) -> list[CausalModel]:
        """The model, for log-probabilities: once on each GPU that this process may use, or on the CPU."""
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if self._device == "cuda" else []
        model = load(self.folder).to(getattr(torch, DTYPES[self.sampler_settings.precision]))
        if not devices and isinstance(model, Decoder):  # for layers that our own code does not take
            model.functions.linear = cpu_linear.linear
        return [deepcopy(model).to(device) for device in devices] or [model.to(self._device)]

    def _sampler_for(self, context: int, num_tokens: int) -> InProcess | Replicas:
        """Samplers with room for so many tokens of prompt and answer, and as many of them as num_tokens keep busy:
        those of the last benchmark where they will do."""
        settings = self.sampler_settings
        flops = 2.0 * matrix_parameters(self.folder) * num_tokens
        last = self._sampler
        if last is not None and context <= last.context and replicas_for(settings, flops) <= last.num_replicas:
            return last
        self.close()
        if self._device == "cuda":  # what scoring has left is another process's to take, too
            torch.cuda.empty_cache()
        self._sampler = start_sampler(settings, context=context, flops=flops)
        return self._sampler

    def close(self) -> None:
        """End the samplers."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: the start of a document."""
        start = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids. Plain text gets what `bos` says in front, unless add_special_tokens is False or it is there."""
        is_plain = not (self.is_chat or add_special_tokens is False or self._bos == "never")
        return list(self._encoded(string, is_plain))

    def _encode(self, string: str, is_plain: bool) -> tuple[int, ...]:
        start: str | None = self.tokenizer.bos_token
        if not is_plain or (start is not None and string.lstrip().startswith(start)):
            ids = self.tokenizer.encode(string, add_special_tokens=False)
            if not is_plain or ids[:1] == [self.tokenizer.bos_token_id]:
                return tuple(ids)
        return tuple(self.document(string) if self._bos == "always" else self.tokenizer.encode(string))

    def document(self, text: str) -> list[int]:
        """Token ids with the start-of-document token in front, where the tokenizer has one: as CORE is scored."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        start = self.tokenizer.bos_token_id
        return ids if start is None or ids[:1] == [start] else [start, *ids]

    def switch_template(self, switches: Switches) -> None:
        """Set the chat template's switches for the benchmark under way. Raises SourceError for one that it has not."""
        if switches and isinstance(template := getattr(self.tokenizer, "chat_template", None), str):
            check_switches(template, switches, self.folder)
        self._switches = dict(switches)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt up to where the assistant speaks. Raises ConfigError for a tokenizer without a template."""
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{self.folder} has no chat template; set chat: false for this eval stage.")
        text = self.tokenizer.apply_chat_template(
            chat_history,
            **self._switches,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str)
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Requests with the same context, as a question's choices are, are scored as one question."""
        by_context: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for _, context, answer in requests:
            by_context.setdefault(tuple(context), {})[tuple(answer)] = None
        questions = [Question(context, tuple(answers)) for context, answers in by_context.items()]
        scored = self.score(questions)
        result_by_request: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, bool]] = {}
        for question, scores in zip(questions, scored, strict=True):
            fits = question.fits(self.max_positions)
            for choice, score in zip(question.answers, scores, strict=True):
                pair = (score.logprob, score.is_greedy)
                result_by_request[question.context, choice] = pair if fits else CutScore(pair)
        return [result_by_request[tuple(context), tuple(answer)] for _, context, answer in requests]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of whole texts, each from the start-of-document token; a text longer than the model's
        positions is cut into windows, each with one token of context."""
        questions: list[Question] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=self.max_positions, context_len=1
            )
            for context, answer in map(make_disjoint_window, windows):
                questions.append(Question(tuple(context), (tuple(answer),)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, scores in zip(owners, self.score(questions), strict=True):
            totals[owner] += scores[0].logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Texts that the model writes as the benchmark under way says, without thinking: Answers in the order given. A
        request's number among the documents says which sample of its item it is (nanodag.evaluation.harness)."""
        assert self.under_way is not None
        config, seed = self.under_way
        contexts = [request.args[0] for request in requests]
        params = [
            sampling_params(
                config,
                item_id=str(request.doc.get("item_id", context)),
                sample=int(request.doc_id or 0) % config.num_samples,
                seed=seed,
                max_new_tokens=self.max_new_tokens,
                until=request.args[1].get("until") or (),
                stop_token_ids=self._stop_ids,
            )
            for request, context in zip(requests, contexts, strict=True)
        ]
        return list[str](self.answers(contexts, params, config.thinking))

    def answers(
        self, prompts: Sequence[str], params: Sequence[SamplingParams], tags: ThinkingConfig | None
    ) -> list[Answer]:
        """Answers to prompts in their order, without the thinking between the tags."""
        answers: list[Answer] = []
        written = self.write([self.tok_encode(prompt) for prompt in prompts], params)
        for (ids, ending), sampling, context in zip(written, params, prompts, strict=True):
            text = self._decode(ids, keep=() if tags is None else (tags.begin, tags.end))
            is_open = tags is not None and context.rstrip().endswith(tags.begin)
            answers.append(answer_of(text, ending=ending, tags=tags, is_open=is_open, stops=sampling.stop or ()))
        return answers

    def complete(self, prompts: Sequence[str]) -> list[str]:
        """Greedy continuations of texts, up to the end of the turn; empty for a prompt that is too long."""
        stops = tuple(self._stop_ids)
        params = SamplingParams(max_new_tokens=self.max_new_tokens, temperature=0.0, stop_token_ids=stops)
        return [str(answer) for answer in self.answers(prompts, [params] * len(prompts), None)]

    def write(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[tuple[list[int], Ending]]:
        """The new token ids of each prompt without the one that ended them, and how they ended.

        A prompt that leaves its answer no room in the model's positions is not asked, nor what was kept written again.
        """
        limits = [sampling.max_new_tokens or 0 for sampling in params]
        fitting = [n for n, prompt in enumerate(prompts) if len(prompt) + limits[n] <= self.max_positions]
        if num_over := len(prompts) - len(fitting):
            most = self.max_positions - max(limits)
            log.warning(
                "%d of %s are longer than %d tokens, what max_new_tokens %d leaves of the model's %d; they are not "
                "asked, and count as wrong and as too_long.",
                num_over, counted(len(prompts), "prompt"), most, max(limits), self.max_positions,
            )  # fmt: skip
        written: list[tuple[list[int], Ending]] = [([], "too_long")] * len(prompts)
        keys = {n: content_key("written", prompts[n], params[n].model_dump(mode="json")) for n in fitting}
        known = {n: kept for n in fitting if self.kept is not None and (kept := self.kept.get(keys[n])) is not None}
        for n, answer in known.items():
            written[n] = (answer["ids"], answer["ending"])
        if missing := [n for n in fitting if n not in known]:
            requests = [Request(input_ids=prompts[n], params=params[n], return_logprob=False) for n in missing]
            context = min(slot_tokens(max(len(prompts[n]) + limits[n] for n in fitting)), self.max_positions)
            sampler = self._sampler_for(context, sum(len(prompts[n]) + limits[n] for n in fitting))
            num_done = len(fitting) - len(missing)

            def keep(number: int, completion: Completion) -> None:
                nonlocal num_done
                n = missing[number]
                written[n] = self._ended(completion)
                if self.kept is not None:
                    self.kept.add({keys[n]: {"ids": written[n][0], "ending": written[n][1]}})
                num_done += 1
                self.on_progress(num_done, len(fitting))

            sampler.write(requests, keep)
        self.tokens_read += sum(len(prompts[n]) for n in fitting)
        self.tokens_written += sum(len(written[n][0]) for n in fitting)
        return written

    def _ended(self, completion: Completion) -> tuple[list[int], Ending]:
        """An answer's ids and ending. Raises SamplerError for one given up, as of a model with numbers not finite."""
        ids, reason = completion.output_ids, completion.finish_reason
        if reason is not None and reason.type == "abort":
            raise SamplerError(f"The sampler gave up an answer: {reason.message}")
        if ids and ids[-1] in self._stop_ids:
            ids = ids[:-1]
        return ids, "length" if reason is not None and reason.type == "length" else "stop"

    @cached_property
    def _stop_ids(self) -> list[int]:
        """Tokens that end a text: those of generation_config.json and tokenizer, and a next document's start."""
        path = self.folder / "generation_config.json"
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        ends = named if isinstance(named, list) else [named]
        return sorted({i for i in (*ends, self.tokenizer.eos_token_id, self.tokenizer.bos_token_id) if i is not None})

    def _decode(self, ids: Iterable[int], keep: Sequence[str] = ()) -> str:
        """The text of token ids without special tokens, but those in keep."""
        added = self.tokenizer.added_tokens_decoder.items()
        hidden = {number for number, token in added if token.special and token.content not in keep}
        return str(self.tokenizer.decode([token for token in ids if token not in hidden]))

    def score(self, questions: Sequence[Question]) -> list[list[AnswerScore]]:
        """Scores of every answer of every question, in order."""

        def count(num_done: int, num_tokens: int) -> None:
            self.tokens_read += num_tokens
            self.on_progress(num_done, len(questions))

        return score_questions(
            self.models,
            questions,
            micro_batch_tokens=self._micro_batch_tokens,
            max_positions=self.max_positions,
            on_batch=count,
            kept=self.kept,
        )
