"""Runs environments of the `verifiers` package in that package's own environment: `<its python> verifiers_server.py`.

    verifiers_server.py PARENT SOCKET            serves HTTP on a Unix socket until a signal
    verifiers_server.py PARENT --tasks [STOP]    writes the taskset's tasks to standard output, one JSON a line

Standard input has the `[env]` block of verifiers as JSON, `{"taskset": {"id": "mine"}, "agent": {"max_turns": 4}}`: on
a command line anybody on the machine could read the secret of an option. The server ends with PARENT, a process id, and
whatever it has started ends with it.

    GET  /health     {"environment": "my_module", "seat": "agent"}
    POST /rollouts   {"task": {...}, "base_url": "http://127.0.0.1:1/v1", "api_key": "...", "model": "policy",
                      "sampling": {"temperature": 0.0}}
                     {"ok": true, "reward": 0.5, "components": {...}, "metrics": {...}, "turns": 2, "is_cut": false,
                      "reply": "...", "prompt_tokens": 90, "completion_tokens": 12},
                     or {"ok": false, "error": "HarnessError: ..."}

Of verifiers 0.4.0 two things are set apart, so that one process serves many rollouts at a laptop's price:

1. The default harness is the chat loop of verifiers' own `null` harness, run in this process and not in a process of
   its own for each rollout, which costs a second of a core. A taskset that ships a harness, or options that name one,
   have that one. The default runtime is `subprocess`; verifiers' own is a cloud.
2. All rollouts share one client to the model's address. Each request bears its own rollout's key.

An environment has one seat that the policy plays; each other one needs a `client` of its own. Of nanodag this file
imports only what needs no more than the standard library.
"""

import asyncio
import itertools
import json
import logging
import math
import os
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where nanodag is: not installed in verifiers' environment
from nanodag.children.tree import keep

sys.path.pop()
if __name__ == "__main__":
    keep(int(sys.argv[1]))  # before there are threads

import httpx
import verifiers.v1 as vf
import verifiers.v1.clients.eval as eval_client
from aiohttp import web
from openai import AsyncOpenAI
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

CHAT_LOOP = "nanodag_chat_loop"  # the id of the harness below
TASKS = "--tasks"
MAX_BODY = 64 << 20
NO_KEY = "NANODAG_NO_KEY"  # a variable that is not set: each rollout has a key of its own
MAX_ERROR = 2000

__all__ = ["ChatLoop"]  # what verifiers looks for in a harness's module


class ChatLoop(NullHarness):
    """The `null` harness without a process of its own."""

    async def setup(self, runtime: vf.Runtime) -> None:
        """Nothing is to be installed."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """As verifiers calls it: speak and call tools until an answer calls none."""
        system, prompt = self.resolve_prompt(data)
        messages = _wired(system, prompt)
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=_http())
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        args = Namespace(
            tool_interception_url=tool_interception_url, api_key=secret, bash=False, edit=False, search=False
        )
        try:
            async with AsyncExitStack() as stack:
                connect = _PROGRAM["connect_mcp"]
                tools, dispatch, opened = await connect({"mcpServers": servers}, stack) if servers else ([], {}, {})
                compactor = _PROGRAM["Compactor"](client, ctx.model, tools, False, None)
                await _PROGRAM["run_chat_loop"](args, compactor, messages, dispatch, opened, _http())
        except SystemExit as error:  # so verifiers' loop says that the model cannot be reached
            code = error.code if isinstance(error.code, int) else MODEL_TRANSPORT_ERROR_EXIT_CODE
            return vf.ProgramResult(code, "", traceback.format_exc())
        except Exception:  # noqa: BLE001 - what a program of its own would end with; verifiers says whose fault it is
            return vf.ProgramResult(1, "", traceback.format_exc())
        return vf.ProgramResult(0, "", "")


# The `null` harness bundles some of its modules into one program; they know one another's names only so.
_PROGRAM: dict[str, Any] = {"__name__": "verifiers_chat_program"}
exec(compile(CHAT_PROGRAM_SOURCE, "verifiers_chat_program", "exec"), _PROGRAM)


@cache
def _http() -> httpx.AsyncClient:
    """One client for all loops: making one takes 20 ms, for certificates that loopback needs none of."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.AsyncClient(verify=False, timeout=httpx.Timeout(None, connect=5.0), limits=limits)


class KeyedClient(eval_client.EvalClient):
    """Bears the key of the rollout that a request comes from, at the address that it is for. keys: that address and the
    key, by the id of the trace."""

    keys: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - of all

    def _headers(self, dialect: Any, incoming: Mapping[str, str] | None, session_id: str | None) -> httpx.Headers:
        headers = super()._headers(dialect, incoming, session_id)
        address, key = self.keys.get(session_id or "", ("", ""))
        if address == self.base_url:  # another seat asks elsewhere, with a key of its own
            headers.update(dialect.auth_headers(key))
        return headers


def environment_of(block: Mapping[str, Any]) -> tuple[vf.Env, str]:
    """The environment that an `[env]` block describes, and the policy's seat. Raises ValueError where the policy would
    play none, or two."""
    sys.modules[CHAT_LOOP] = sys.modules[__name__]
    taskset = str(block["taskset"]["id"])
    seats = agent_config_fields(vf.env_config_type(taskset, str(block.get("id", "")))())
    has_own = vf.default_harness_id(taskset) != "bash"
    harness = {} if has_own else {"harness": {"id": CHAT_LOOP}}
    with_defaults = {name: {"runtime": {"type": "subprocess"}, **harness, **block.get(name, {})} for name in seats}
    config = vf.resolve_env_config({**block, **with_defaults})
    played = [name for name, seat in agent_config_fields(config).items() if seat.client is None]
    if len(played) != 1:
        raise ValueError(
            f"the policy would play {len(played)} seats of {taskset} ({', '.join(played) or 'none'}), and it plays "
            "one; give each other one a client, as in the options judge.client.base_url and judge.model"
        )
    return vf.load_environment(config), played[0]


class RolloutServer:
    """Answers for one environment. seat: the policy's."""

    def __init__(self, environment: vf.Env, seat: str) -> None:
        self._environment, self._seat = environment, seat
        self._task = type(environment.taskset).task_type()

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"environment": self._environment.config.env_id, "seat": self._seat})

    async def rollout(self, request: web.Request) -> web.Response:
        """Run one. A client that hangs up ends it."""
        body = await request.json()
        return web.json_response(await self.outcome(body), dumps=partial(json.dumps, allow_nan=False))

    async def outcome(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Result of a rollout."""
        traces: list[str] = []

        def begun(trace: vf.Trace) -> None:
            traces.append(trace.id)
            KeyedClient.keys[trace.id] = asked["base_url"], asked["api_key"]

        try:
            task = self._task(
                self._task.data_type().model_validate(asked["task"]), self._environment.config.taskset.task
            )
            client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=NO_KEY)
            (slot,) = self._environment.slots(task)
            sampling = vf.SamplingConfig(**asked["sampling"])
            context = vf.ModelContext(model=asked["model"], client=client, sampling=sampling)
            return result_of(await self._environment.run_slot(slot, context, on_trace=begun), self._seat)
        except Exception as error:  # noqa: BLE001 - an environment's own fault, which its rollout's caller is told
            return _failed(f"{type(error).__name__}: {error}")
        finally:
            for trace in traces:
                KeyedClient.keys.pop(trace, None)


def result_of(episode: vf.Episode, seat: str) -> dict[str, Any]:
    """The reward, its parts and the metrics of the trace of the policy's seat."""
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if not episode.ok or len(traces) != 1:
        last = errors[-1] if errors else None
        what = f"{last.type}: {last.message}" if last else f"the policy played {len(traces)} times, and once is wanted"
        return _failed(what)
    (trace,) = traces
    components = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    numbers = {"reward": trace.reward, **components, **metrics}
    if broken := sorted(name for name, value in numbers.items() if not math.isfinite(value)):
        return _failed(f"{broken[0]} is {numbers[broken[0]]}")
    if trace.is_timeout and not components:
        return _failed(f"it ended without a reward: {trace.stop_condition}")
    return {
        "ok": True,
        "reward": trace.reward,
        "components": components,
        "metrics": metrics,
        "turns": trace.num_turns,
        "is_cut": trace.is_truncated,
        "reply": trace.last_reply,
        "prompt_tokens": used.prompt_tokens if (used := trace.usage) else 0,
        "completion_tokens": used.completion_tokens if used else 0,
    }


def _failed(why: str) -> dict[str, Any]:
    return {"ok": False, "error": why[:MAX_ERROR]}


def write_tasks(environment: vf.Env, stop: int | None, out: TextIO) -> None:
    """The tasks before `stop` in their order, as `load()` gives them: `{"task": ..., "messages": [...]}` a line. Raises
    ValueError for all of a taskset without an end."""
    if stop is None and not environment.taskset.bounded:
        name = type(environment.taskset).__name__
        raise ValueError(f"{name} has no end, and data are a list: take a slice of it, as verifiers:MODULE[0:1000]")
    for task in itertools.islice(environment.taskset, stop):
        data = task.data
        task_json = data.model_dump(mode="json", exclude_defaults=True)
        print(json.dumps({"task": task_json, "messages": _wired(data.system_prompt, data.prompt)}), file=out)


def _wired(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """A system prompt and a prompt, a text or messages, as OpenAI's messages."""
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
    return [*([{"role": "system", "content": system}] if system else []), *map(message_to_wire, messages)]


async def serve(environment: vf.Env, seat: str, socket: str) -> None:
    """Until SIGTERM; then what the environment has started ends, and its folders go."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    server = RolloutServer(environment, seat)
    application = web.Application(client_max_size=MAX_BODY)
    application.add_routes([web.get("/health", server.health), web.post("/rollouts", server.rollout)])
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    async with environment.serving():
        await runner.setup()
        await web.UnixSite(runner, socket).start()
        try:
            await ended.wait()
        finally:
            await runner.cleanup()


def main() -> None:
    """As the first lines of this file say."""
    logging.basicConfig(level=logging.WARNING)
    eval_client.EvalClient = KeyedClient
    os.environ.pop("PRIME_API_KEY", None)  # nothing here is to be billed to anybody
    block, (where, *number) = json.load(sys.stdin), sys.argv[2:]
    out, sys.stdout = sys.stdout, sys.stderr  # what an environment prints is no task
    environment, seat = environment_of(block)
    if where == TASKS:
        write_tasks(environment, int(number[0]) if number else None, out)
    else:
        asyncio.run(serve(environment, seat, where))


if __name__ == "__main__":
    main()
