"""The application over real engines: in this process, or as the process that `nanodag serve` starts."""

import os
import re
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import SimpleNamespace

import httpx

from nanodag.api.application import application
from nanodag.api.served_model import Limits
from nanodag.api.sglang_routes import passed_on
from nanodag.engines.fleet import Fleet
from nanodag.inference.client import SamplerClient
from tests.api.scripted import model_of
from tests.evaluation.tiny import POSITIONS
from tests.fault.processes import wait_until
from tests.forks import start_module


def fleet_over(process, folder, token):
    """A fleet whose one engine is a process that is up."""
    kept = SimpleNamespace(url=process.url, pid=process.pid, is_alive=True, stop=lambda: None)
    connect = partial(SamplerClient, token=token)
    return Fleet(model=folder, version="default", max_restarts=None, launch=lambda *of: kept, connect=connect)


@asynccontextmanager
async def client_over(folder, fleet, count=1, **limits):
    """A client of the API over a fleet that is started with so many engines."""
    await fleet.start(count)
    try:
        models, limited = {"tiny": model_of(folder, fleet, context=POSITIONS)}, Limits(**limits)
        transport = httpx.ASGITransport(application(models, limits=limited, engine_routes=passed_on(models, limited)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client
    finally:
        await fleet.end()


@contextmanager
def served(folder, log, *options):
    """The process that serves a folder's model, and what it says when it is up."""
    arguments = ["--model", f"tiny={folder}", "--port", "0", "--device", "cpu", *options]
    process = start_module("nanodag.chat.web", *arguments, environment=dict(os.environ), log=log)
    try:
        wait_until(lambda: process.poll() is not None or "Ctrl-C ends it" in log.read_text(), timeout_s=120)
        assert process.poll() is None, log.read_text()
        yield process, re.search(r"Serving .*", log.read_text())[0]
    finally:
        process.kill()
