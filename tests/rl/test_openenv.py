"""`generate: openenv:URL` against a server that speaks OpenEnv's protocol: `/schema` and the messages of `/ws`."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from aiohttp import WSMsgType, web

from nanodag.host.threads import LoopThread
from nanodag.rl.environments import class_environment, openenv_session
from nanodag.rl.environments.environment import Action, ToolCall
from nanodag.rl.environments.openenv_session import OpenEnv

RECORD = {"messages": [{"role": "user", "content": "Play."}], "metadata": {"reset": {"level": 2}}}
TRIED = web.AppKey("tried", list)
TEXT = {"type": "string"}
SCHEMAS = {  # as pydantic writes those of OpenEnv's own actions
    "guess": {"title": "GuessAction", "properties": {"metadata": {}, "guess": TEXT}, "required": ["guess"]},
    "move": {"title": "MoveAction", "properties": {"metadata": {}, "x": {"$ref": "#/$defs/Column"}, "why": TEXT},
             "$defs": {"Column": {"type": "integer"}}, "required": ["x"]},
    "tools": {"title": "CallToolAction", "properties": {"type": {}, "tool_name": TEXT}, "required": ["tool_name"]},
}  # fmt: skip
SCHEMAS["full"] = SCHEMAS["guess"]
NO_PLACE = {"message": "full", "code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}


class Game:
    """One session of each kind: three steps, or `end`, end it. A ValueError refuses a message."""

    def __init__(self, kind):
        self.kind, self.steps = kind, 0

    def answer(self, message):
        data = message["data"]
        if message["type"] == "reset":
            return self.told({"text": f"level {data['level']} seed {data['seed']}"}, None)
        if data.get("type") == "list_tools":
            schema = {"type": "object", "properties": {"word": TEXT}, "required": ["word"]}
            return self.told({"tools": [{"name": "look", "description": "Looks.", "input_schema": schema}]}, None)
        self.steps += 1
        if self.kind == "tools":
            word = data["arguments"]["word"]
            error = {"error_type": "invalid_args", "message": "no"} if word == "bad" else None
            return self.told({"tool_name": "look", "result": {"data": word.upper()}, "error": error})
        if self.kind == "move":
            return self.told({"at": data["x"], "hint": "", "walls": [1]})
        if "guess" not in data:
            errors = [{"loc": ["guess"], "msg": "Field required"}, {"loc": ["word"], "msg": "not permitted"}]
            raise ValueError({"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors})
        if data["guess"] == "crash":
            raise ValueError({"message": "boom", "code": "EXECUTION_ERROR"})
        return self.told({"text": f"not {data['guess']}", "hint": ""}, is_over=data["guess"] == "end")

    def told(self, observation, reward=0.25, *, is_over=False):
        return {"observation": observation, "reward": reward, "done": is_over or self.steps == 3}


async def session(request):
    kind = request.match_info["kind"]
    socket, game = web.WebSocketResponse(), Game(kind)
    await socket.prepare(request)
    if kind == "full":
        request.app[TRIED].append(kind)
        if len(request.app[TRIED]) % 3:  # two of three find no place
            await socket.send_str(json.dumps({"type": "error", "data": NO_PLACE}))
            await socket.close()
    async for message in socket:
        if message.type != WSMsgType.TEXT:
            break
        try:
            answer = {"type": "observation", "data": game.answer(json.loads(message.data))}
        except ValueError as refused:
            answer = {"type": "error", "data": refused.args[0]}
        await socket.send_str(json.dumps(answer))
    return socket


async def schema(request):
    return web.json_response({"action": SCHEMAS[request.match_info["kind"]], "observation": {}, "state": {}})


@pytest.fixture(scope="module")
def server():

    async def serving():
        app = web.Application()
        app[TRIED] = []
        app.add_routes([web.get("/{kind}/schema", schema), web.get("/{kind}/ws", session)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    thread = LoopThread("openenv")
    runner = asyncio.run(thread.do(serving()))
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    asyncio.run(thread.do(runner.cleanup()))


def begun(url, **options):
    game = OpenEnv(url=url, **options)
    return game, game.reset(seed=5 + (1 << 40), record=RECORD)


def test_an_action_of_one_text_is_what_the_policy_says_and_one_that_does_not_fit_is_answered(server):
    game, heard = begun(f"{server}/guess")
    assert heard == [{"role": "user", "content": "Play.\n\nlevel 2 seed 5"}] and game.tools() == []
    assert game.step(Action("7")) == ("not 7", 0.25, False, {})
    assert game.step(Action("end"))[2] is True
    with pytest.raises(ValueError, match=r"refuses step: .*boom"):
        game.step(Action("crash"))
    game, _ = begun(f"{server}/guess", action="act")
    calls = (ToolCall("act", {"word": "7"}), ToolCall("act", {"guess": "7"}))
    heard = ["error: guess: Field required; word: not permitted", "not 7"]
    assert game.step(Action("", calls)) == (heard, 0.25, False, {})


def test_the_tools_of_an_mcp_environment_are_called_each_in_a_step_and_speech_ends_it(server):
    game, _ = begun(f"{server}/tools")
    (tool,) = game.tools()
    assert tool["function"]["name"] == "look" and tool["function"]["parameters"]["required"] == ["word"]
    calls = tuple(ToolCall("look", {"word": word}) for word in ("one", "bad"))
    assert game.step(Action("", calls)) == (["ONE", "error: no"], 0.5, False, {})
    assert game.step(Action("done")) == ([], 0.0, True, {})


def test_an_action_of_other_fields_is_a_tool_with_these_arguments(server):
    game, _ = begun(f"{server}/move")
    parameters = game.tools()[0]["function"]["parameters"]
    assert parameters["required"] == ["x"] and parameters["$defs"] == {"Column": {"type": "integer"}}
    assert game.step(Action("", (ToolCall("act", {"x": 3}),))) == ('{"at": 3, "walls": [1]}', 0.25, False, {})
    assert begun(f"{server}/move", observation="at")[0].step(Action("", (ToolCall("act", {"x": 3}),)))[0] == "3"
    assert begun(f"{server}/move", action="why")[0].tools() == []
    with pytest.raises(ValueError, match=r"has no field 'y'; it has x, why"):
        OpenEnv(url=f"{server}/move", action="y")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9 does not tell its schema"):
        OpenEnv(url="http://127.0.0.1:9")


def test_a_session_waits_for_the_end_of_another_and_says_for_how_many_there_is_room(server, monkeypatch):
    assert begun(f"{server}/full")[0].step(Action("7"))[0] == "not 7"
    monkeypatch.setattr(openenv_session, "FREE_TIMEOUT_S", 0.0)
    with pytest.raises(ValueError, match=r"allows 1 sessions at once .*: set generate\.options\.at_once to at most 1"):
        begun(f"{server}/full")


def test_no_more_sessions_are_open_than_the_server_allows(monkeypatch):
    numbers, is_open = [], set()

    async def episode(sampler, sample, **options):
        is_open.add(sample)
        numbers.append(len(is_open))
        await asyncio.sleep(0.01)
        is_open.remove(sample)

    async def all_of_them():
        sampler = SimpleNamespace(placed=lambda place: place)
        await asyncio.gather(*(class_environment.openenv(sampler, n, named="http://x", at_once=2) for n in range(4)))

    monkeypatch.setattr(class_environment, "environment", episode)
    asyncio.run(all_of_them())
    assert max(numbers) == 2 and len(numbers) == 4
