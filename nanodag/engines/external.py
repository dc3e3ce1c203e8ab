"""The external kind of engine: a server that somebody else runs, named by URL and never stopped. No torch here.

It is started with `nanodag sampler serve`, or with SGLang's own command. A stage has its servers to itself: it ends
what runs there when it comes, and pushes its weights to them.

    named     in rl.sampler.urls or a line of rl.sampler.urls_file, which may change while the stage runs
    attached  it answers, knows our key, and is what the stage needs: engine, version, model, precision, context
    up        it has the current weights: prompts are sent to it
    left out  it was lost, or said something that cannot be: the reason is logged, and it is tried again
"""

import asyncio
import json
import logging
import math
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanodag import __version__
from nanodag.engines.replica import NO_FOLDER, Opened, Replica, WeightsFolder
from nanodag.engines.start import CONTEXT_RESERVE
from nanodag.errors import BadRequest, ConfigError, SamplerError, SamplerLost
from nanodag.inference.addresses import Address, read_addresses, read_keys
from nanodag.inference.client import SamplerClient
from nanodag.inference.protocol import Completion, Request
from nanodag.model.architecture import Architecture

if TYPE_CHECKING:
    from nanodag.engines.roster import Roster

log = logging.getLogger(__name__)
T = TypeVar("T")

SGLANG_VERSION = "0.5.23"
NO_WEIGHTS_THERE = "Cannot find any model weights"  # what SGLang says of a folder that it sees, without any
HASHING = 10  # times as long as another answer may take: a large model's tensors are hashed
LARGEST_LOGPROB = 0.01  # above 0 by rounding alone
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ExternalServer:
    """A server of somebody else, as `ServerProcess` is one of ours. To kill it means to stop using it."""

    pid = 0

    def __init__(self, client: SamplerClient) -> None:
        self.url = client.url
        self._client = client
        self.is_alive = True

    def kill(self) -> None:
        """Stop using it; its process keeps running."""
        self.is_alive = False
        self._client.is_closed = True

    stop = kill

    def tail(self) -> str:
        """Words on where its log is."""
        return f"(the log of {self.url} is with whoever started it)"


class ExternalReplica(Replica):
    """An engine whose server somebody else runs. It never ends the fleet, unless no engine is left."""

    is_own = False
    faults = SamplerError
    must_answer = True

    def __init__(self, number: int, fleet: "Roster", url: str, servers: "ExternalServers") -> None:
        super().__init__(number, fleet)
        self.url, self._servers = url, servers

    @property
    def is_named(self) -> bool:  # type: ignore[override] # read alone
        return self.url in self._servers.named()

    @property
    def name(self) -> str:
        return f"Sampler {self.number} ({self.url})"

    async def open(self, weights: WeightsFolder) -> Opened:
        """Begin with the server. Raises SamplerError when it does not answer, or does not fit."""
        if (named := self._servers.named().get(self.url)) is None:
            raise SamplerLost(f"{self.url} is no longer named")
        server, client = await self._servers.attach(named)
        return server, client, WeightsFolder(NO_FOLDER, weights.version)

    def pause_s(self, attempt: int) -> float:
        return min(self._servers.every_s * 2.0 ** min(attempt - 1, 16), self._servers.longest_s) if attempt else 0.0

    def check_answers(
        self, requests: Sequence[Request], answers: Sequence[Sequence[Completion]], first: Any, last: Any
    ) -> None:
        """Raise SamplerError for answers that cannot be: of other weights than the server was given, without a
        log-probability for each token."""
        versions = [str(version) for version in range(first, last + 1)]
        for request, group in zip(requests, answers, strict=True):
            for answer in group:
                _check_answer(request, answer, versions)

    async def held_version(self, client: SamplerClient) -> str:
        """The weights that it says it has. Raises SamplerLost where it was given others."""
        version = await super().held_version(client)
        if version != str(self.version):
            raise SamplerLost(f"it says that it has weights {version}, and was given {self.version}")
        return version

    def went(self, error: SamplerError) -> None:
        self._servers.note(self.url, error)

    def came(self) -> None:
        self._servers.note(self.url, None)
        log.info("%s takes part, with weights %s", self.name, self.version)


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Requirements on a server. precision: `float32` or `bfloat16`. context: tokens of a prompt and its response.
    numerics: what rounds as this stage's other samplers do, "" for whatever the first one says; only where
    is_deterministic. keeps_prompts: whether it may keep keys and values of prompts (SGLang's radix cache)."""

    engine: str
    architecture: Architecture
    precision: str
    context: int
    is_deterministic: bool
    keeps_prompts: bool
    numerics: str = ""


def misfits(needed: Needed, model: Mapping[str, Any], server: Mapping[str, Any]) -> list[str]:
    """Faults of a server, by its answers to /model_info and /server_info; each with what to do."""
    engine = str(server.get("engine", "sglang"))
    if engine != needed.engine:
        return [f"it is engine {engine}, and the stage's sampler.engine is {needed.engine}: start that one"]
    faults = [] if model.get("is_generation") else ["its model does not generate"]
    faults += (_embedded if engine == "embedded" else _guest)(needed, model, server)
    if needed.precision != (dtype := str(server.get("dtype"))):
        faults.append(
            f"its dtype is {dtype}, and the stage's sampler.precision means {needed.precision}: start it with --dtype "
            f"{needed.precision}"
        )
    return faults


def _of_shape(needed: Needed, model: Mapping[str, Any]) -> list[str]:
    architecture, ours = model.get("architecture"), json.loads(json.dumps(asdict(needed.architecture)))
    theirs = architecture if isinstance(architecture, dict) else {}
    return [
        f"its model has {name} {theirs.get(name)}, the stage's {value}: serve the same model"
        for name, value in ours.items()
        if theirs.get(name) != value
    ]


def _of_context(found: Any, needed: Needed, wanted: int) -> list[str]:
    if isinstance(found, int) and found >= needed.context:
        return []
    return [
        f"it takes {found} tokens, and the stage needs {needed.context} of prompt and response: start it with "
        f"--context-length {wanted}, or lower sampler.context"
    ]


def _embedded(needed: Needed, model: Mapping[str, Any], server: Mapping[str, Any]) -> list[str]:
    if server.get("version") != __version__:
        return [f"it is nanodag {server.get('version')}, and this is {__version__}: install the same on both machines"]
    faults = _of_shape(needed, model)
    if needed.is_deterministic and not server.get("deterministic"):
        faults.append("sampler.deterministic is true, and it is not deterministic: start it with --deterministic")
    if needed.is_deterministic and needed.numerics not in ("", server.get("numerics")):
        faults.append(
            f"sampler.deterministic is true, and it rounds otherwise than the stage's other samplers (its processor "
            f"and torch: {server.get('numerics')}; theirs: {needed.numerics}): use machines of one kind, or set it to "
            "false"
        )
    return faults + _of_context(server.get("context_length"), needed, needed.context)


def _guest(needed: Needed, model: Mapping[str, Any], server: Mapping[str, Any]) -> list[str]:
    faults = _of_shape(needed, model) if needed.engine == "vllm" else []
    if "version" not in server or "weight_version" not in model:
        return ["it does not speak SGLang's protocol: no version, or no weight_version"]
    if needed.engine == "sglang" and server["version"] != SGLANG_VERSION:
        log.warning("A server is SGLang %s; %s is what was tested.", server["version"], SGLANG_VERSION)
    if model.get("model_type") != needed.architecture.model_type:
        faults.append(
            f"its model is of type {model.get('model_type')}, the stage's is {needed.architecture.model_type}: serve "
            "the same model"
        )
    if not needed.keeps_prompts and not server.get("disable_radix_cache"):
        faults.append(
            "weights.sync_mode is in_place, which needs it without its cache of prompts: SGLang's "
            "--disable-radix-cache, vLLM's --option enable_prefix_caching=false"
        )
    for name in ("dp_size", "pp_size", "nnodes"):  # what SGLang gives weights to has none of them
        if server.get(name, 1) != 1:
            faults.append(f"its {name} is {server[name]}, and such a server takes no weights: start it without")
    longest = server.get("max_req_input_len")  # it keeps a token for the answer
    room = longest + 1 if isinstance(longest, int) else longest
    return faults + _of_context(room, needed, needed.context + (CONTEXT_RESERVE if needed.engine == "sglang" else 0))


def layers_differ(fingerprints: Sequence[Mapping[str, str]], num_layers: int) -> str:
    """Fault of the layers that a server's tensors are of, "" for none. SGLang passes over tensors of
    layers that it does not have, and keeps what it has too many."""
    layers = {int(match[1]) for rank in fingerprints for name in rank if (match := _LAYER.search(name))}
    if layers == set(range(num_layers)):
        return ""
    return f"its model has {len(layers)} layers, the stage's {num_layers}: serve the same model"


def _check_answer(request: Request, answer: Completion, versions: Sequence[str]) -> None:
    told = {answer.weight_version, *(span.version for span in answer.weight_versions)}
    if strange := told - set(versions):
        raise SamplerLost(
            f"it answered with weights {min(strange)!r:.80} and was given {versions[0]}: it was started again, or "
            "somebody else gives it weights"
        )
    are_logprobs = all(isinstance(p, int | float) and -math.inf < p < LARGEST_LOGPROB for p in answer.logprobs)
    if request.return_logprob and not (are_logprobs and len(answer.logprobs) == len(answer.output_ids)):
        raise SamplerError("it answered with tokens that have no log-probabilities, or impossible ones")
    if not all(type(token) is int and token >= 0 for token in answer.output_ids):
        raise SamplerError("it answered with what is no token")


@dataclass(eq=False)
class ExternalServers:
    """Addresses of external servers that are named now, and how to begin with the server at each.

    urls: addresses of the config. file: of further ones, read again and again; None for none. needed: what each must
    be. folder: where weights go that servers read, None where they get them by network. connect: a client
    of a URL with a key. every_s: between two looks at the file and two tries, which grow to longest_s. timeout_s: for
    each answer of a server that begins. patience_s: for one of them to be up, where no other sampler is.
    """

    urls: Sequence[Address]
    _: KW_ONLY
    file: Path | None
    needed: Needed
    folder: Path | None
    connect: Callable[[str, str], SamplerClient]
    every_s: float = 1.0
    longest_s: float = 30.0
    timeout_s: float = 20.0
    patience_s: float = 120.0
    _in_file: list[Address] = field(default_factory=list, init=False)
    _looked: float = field(default=-math.inf, init=False)
    _fault: str = field(default="", init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)

    def named(self) -> dict[str, Address]:
        """By URL. A file that cannot be read, or is wrong, leaves what it said before."""
        if self.file is not None and time.monotonic() - self._looked >= self.every_s:
            self._looked = time.monotonic()
            try:
                self._in_file, self._fault = read_addresses(self.file), ""
            except (OSError, ValueError) as error:
                if str(error) != self._fault:
                    log.warning("sampler.urls_file: %s. The servers that it named before stay.", error)
                self._fault = str(error)
        return {address.url: address for address in (*self.urls, *self._in_file)}

    async def attach(self, address: Address) -> tuple[ExternalServer, SamplerClient]:
        """Begin with a server: it answers, fits, and nothing runs there. Its weights are whatever they are. Raises
        SamplerError: BadRequest where it must be started otherwise, another one where it may answer later."""
        client = self.connect(address.url, self._key(address))
        try:
            await self._begin(client)
        except BaseException:
            await client.close()
            raise
        return ExternalServer(client), client

    def _key(self, address: Address) -> str:
        if not address.key_file:
            return ""
        try:
            return read_keys(Path(address.key_file).expanduser(), named="The file of its key,", least=1)[0]
        except ConfigError as error:
            raise BadRequest(str(error)) from error

    async def _begin(self, client: SamplerClient) -> None:
        try:
            model = await self._in_time(client.model_info())
            server = await self._in_time(client.server_info())
        except BadRequest as error:
            raise BadRequest(
                f"{error} (what is named is a sampler itself, no router or web server; its key stands in a file behind "
                "its URL)"
            ) from error
        if faults := misfits(self.needed, model, server):
            raise BadRequest("; ".join(faults))
        if isinstance(tensor_parallel := server.get("tp_size"), int):  # the embedded one is one process
            client.num_ranks = tensor_parallel
        if self.needed.is_deterministic and not self.needed.numerics:  # the others are to round as the first one
            self.needed = replace(self.needed, numerics=str(server.get("numerics")))
        if self.needed.engine == "sglang" and (wrong := await self._other_layers(client)):
            raise BadRequest(wrong)
        await self._in_time(client.abort())
        await self._in_time(client.resume())  # who had it before may have left it paused
        try:  # or in the midst of new weights
            await self._in_time(client.end_weight_update())
        except SamplerLost:
            raise
        except SamplerError as error:  # it is not, or it is an SGLang that does not know the call
            log.debug("%s: %s", server, error)
        if self.folder is not None:
            await self._check_folder(client, self.folder)

    async def _other_layers(self, client: SamplerClient) -> str:
        try:
            fingerprints = await self._in_time(client.fingerprints(), times=HASHING)
            return layers_differ(fingerprints, self.needed.architecture.num_layers)
        except SamplerLost:
            raise
        except SamplerError as error:
            log.warning("It is not known whether %s has as many layers: %s", client.url, error)
            return ""

    async def _check_folder(self, client: SamplerClient, folder: Path) -> None:
        """Raise BadRequest when it does not see the files that this machine writes there: it is asked to take a
        folder in which there are no weights, and must say so."""
        word = f"probe-{secrets.token_hex(8)}"
        probe = folder / word[:12]
        probe.mkdir(parents=True)
        try:
            (probe / "config.json").write_text(json.dumps({"model_type": word}))
            await self._in_time(client.update_weights_from_disk(str(probe), word))
            reply = "took it for weights"
        except BadRequest as error:
            reply = str(error)
        finally:
            shutil.rmtree(probe, ignore_errors=True)
        if word not in reply and NO_WEIGHTS_THERE not in reply:
            raise BadRequest(
                f"it does not see what this machine writes into {folder} (asked to read there, it said: {reply:.300}). "
                "With weights.sync: disk both machines must share that folder under the same path: put the store's "
                "local folder onto a shared file system, or use weights.sync: distributed"
            )

    async def _in_time(self, call: Awaitable[T], *, times: int = 1) -> T:
        try:
            async with asyncio.timeout(times * self.timeout_s):
                return await call
        except TimeoutError as error:
            raise SamplerLost(f"no answer within {times * self.timeout_s:g} s") from error

    def note(self, url: str, error: SamplerError | None) -> None:
        """Keep why a server is left out, None where it is not; a new reason is logged."""
        if error is None:
            self._reasons.pop(url, None)
            return
        if str(error) != self._reasons.get(url):
            log.warning("The sampler at %s is left out until it answers as it should: %s", url, error)
        self._reasons[url] = str(error)

    def why_none(self) -> SamplerLost:
        """The error for a stage whose servers are all left out."""
        named = self.named()
        reasons = "; ".join(f"{url}: {self._reasons.get(url, 'not tried yet')}" for url in named)
        return SamplerLost(
            f"No sampler is up, and none came within {self.patience_s:g} s (sampler.start_timeout_s). "
            + (f"Left out are {reasons}." if named else "sampler.urls and sampler.urls_file name none.")
        )

    async def first_look(self) -> None:
        """Look at every server that is named. Raises SamplerError for those that do not fit; who does not answer is
        waited for later."""
        named = self.named()
        errors = await asyncio.gather(*map(self._looked_at, named.values()))
        wrong = [f"{url}: {error}" for url, error in zip(named, errors, strict=True) if isinstance(error, BadRequest)]
        if wrong:
            raise SamplerError(f"Servers of sampler.urls cannot be used. {'; '.join(wrong)}.")

    async def _looked_at(self, address: Address) -> SamplerError | None:
        try:
            server, client = await self.attach(address)
        except SamplerError as error:
            self.note(address.url, error)
            return error
        server.kill()
        await client.close()
        return None
