"""Stands for nanodag/external_envs/verifiers_server.py: does what a rollout's task says. As that, it ends
with its parent."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from aiohttp import web

from nanodag.children.tree import keep

FAKE = Path(__file__)
KEPT = []


async def health(request):
    return web.json_response({})


def speak(asked, text):
    body = {"model": asked["model"], "messages": [{"role": "user", "content": text}], **asked["sampling"]}
    headers = {"Authorization": f"Bearer {asked['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{asked['base_url']}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def rollout(request):
    asked = await request.json()
    task = asked["task"]
    if task["do"] == "die once" and not os.path.exists(task["file"]):
        open(task["file"], "w").close()
        os._exit(3)
    if task["do"] == "die":
        print("a last word", flush=True)
        os._exit(3)
    if task["do"] == "leave":  # a process behind it
        print("left", subprocess.Popen(["sleep", "3600"]).pid, flush=True)
        os._exit(3)
    if task["do"] == "leak":
        KEPT.append(b"x" * (160 << 20))
        await asyncio.sleep(3600)
    if task["do"] == "block":
        time.sleep(3600)
    if task["do"] == "wait":
        await asyncio.sleep(3600)
    if task["do"] == "fail":
        return web.json_response({"ok": False, "error": "TaskError: no"})
    said, metrics = "", {}
    if "say" in task:
        said = await asyncio.to_thread(speak, asked, task["say"])
        metrics = {"length": len(said)}
    parts = {"reward": 0.5, "components": {"pid": os.getpid()}, "metrics": metrics, "turns": 1, "is_cut": False}
    parts |= {"reply": said, "prompt_tokens": 0, "completion_tokens": 0}
    return web.json_response({"ok": True, **parts})


async def main(socket):
    application = web.Application()
    application.add_routes([web.get("/health", health), web.post("/rollouts", rollout)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    keep(int(sys.argv[1]))
    block = json.load(sys.stdin)
    if sys.argv[2] == "--tasks":
        for text in ("the cat", "the dog", "the mat", "fail"):
            task = {"do": "fail"} if text == "fail" else {"do": "answer", "say": text}
            print(json.dumps({"task": task, "messages": [{"role": "user", "content": text}]}))
    else:
        assert block == {"taskset": {"id": "m"}}, block
        asyncio.run(main(sys.argv[2]))
