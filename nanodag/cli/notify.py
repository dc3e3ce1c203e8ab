"""`nanodag notify`: whether what `notify.webhook` names takes a message."""

import json
import os
import subprocess
import sys

from nanodag.cli.live_table import make_console
from nanodag.cli.nightly import settings
from nanodag.errors import ConfigError, ServerError
from nanodag.run.notifications import post
from nanodag.server.local_server import server_of


def send_trial(overrides: list[str], *, preset: str, file: str) -> None:
    """Send a message that says what it is. Raises ConfigError where nothing is named, ServerError where it is not
    taken."""
    path, pipeline, store = settings(overrides, preset=preset, file=file)
    webhook, console = pipeline.notify.webhook, make_console()
    if webhook == "none":
        raise ConfigError(
            f"notify.webhook of preset {pipeline.preset} is none: nobody is told. Set it in {path}, or try one with: "
            "nanodag notify notify.webhook=env:NAME"
        )
    body = {"run": "trial", "text": "nanodag: a trial of notify.webhook. Runs and nights that fail are told of here."}
    if webhook.startswith("env:"):
        post(webhook, body)
        console.print(
            f"Sent to the address in {webhook.removeprefix('env:')}. The server has the environment that it "
            "was started in."
        )
        return
    server = server_of(pipeline, store, path)
    running = server.ensure(lambda text: console.print(text, style="dim"))
    ended = subprocess.run(
        [sys.executable, "-m", "tasks.notify", webhook, json.dumps(body)],
        env={**os.environ, **server.environment(running)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        # What a service's error says may hold the address.
        said = last if last.startswith("ValueError: Unable to find block") else last.partition(":")[0]
        raise ServerError(f"notify.webhook {webhook} took no message: {said}")
    console.print(f"Sent to {webhook}.")
