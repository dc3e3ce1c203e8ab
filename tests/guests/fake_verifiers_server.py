"""Stands for nanodag/guests/verifiers_server.py: does what a rollout's task says. It ends when its input does."""

import asyncio
import json
import os
import sys
import time

from aiohttp import web


async def health(request):
    return web.json_response({})


async def rollout(request):
    task = (await request.json())["task"]
    if task["do"] == "die":
        print("a last word", flush=True)
        os._exit(3)
    if task["do"] == "block":
        time.sleep(3600)
    if task["do"] == "wait":
        await asyncio.sleep(3600)
    if task["do"] == "fail":
        return web.json_response({"ok": False, "error": "TaskError: no"})
    parts = {"reward": 0.5, "components": {"pid": os.getpid()}, "metrics": {}, "turns": 1, "truncated": False}
    return web.json_response({"ok": True, **parts})


async def main(socket):
    application = web.Application()
    application.add_routes([web.get("/health", health), web.post("/rollouts", rollout)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    await asyncio.Event().wait()


assert json.loads(sys.argv[1]) == {"taskset": {"id": "m"}} and int(sys.argv[3]) == os.getppid()
asyncio.run(main(sys.argv[2]))
