"""Environments written with the `openenv` package's own classes; uvicorn runs them in an environment that has it."""

import random
from enum import Enum

from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    guess: str


class Direction(Enum):
    up = "up"
    down = "down"


class MoveAction(Action):
    to: Direction


class Heard(Observation):
    text: str = ""


class Guess(Environment):
    """A number from 0 to 9, drawn from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, level=1):
        self.number, self._state = random.Random(seed).randrange(10), State(step_count=0)
        return Heard(text=f"level {level}")

    def step(self, action):
        self._state.step_count += 1
        if action.guess == "crash":
            raise RuntimeError("boom")
        is_right = action.guess == str(self.number)
        return Heard(text="yes" if is_right else f"not {action.guess}", reward=float(is_right), done=is_right)

    @property
    def state(self):
        return self._state


class Tower(Guess):
    """Up and down a tower."""

    def step(self, action):
        return Heard(text=f"went {action.to.value}", reward=0.5, metadata={"floor": 1})


class Words(MCPEnvironment):
    """A tool that writes words large."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("words")

        @server.tool
        def large(word: str) -> str:
            """Writes a word large."""
            return word.upper()

        super().__init__(server)

    def reset(self, seed=None, episode_id=None):
        return Observation()

    def _step_impl(self, action, timeout_s=None):
        raise NotImplementedError

    @property
    def state(self):
        return State()


app = FastAPI()
app.mount("/guess", create_fastapi_app(Guess, GuessAction, Heard, max_concurrent_envs=64))
app.mount("/one", create_fastapi_app(Guess, GuessAction, Heard, max_concurrent_envs=1))
app.mount("/tower", create_fastapi_app(Tower, MoveAction, Heard, max_concurrent_envs=64))
app.mount("/words", create_fastapi_app(Words, CallToolAction, CallToolObservation, max_concurrent_envs=64))
