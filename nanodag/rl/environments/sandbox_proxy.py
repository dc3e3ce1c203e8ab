"""First program in the sandbox of an agent: a way to the API, then the agent's program. Standard library only.

It is no module of the package: its text is the program that the sandbox starts. There is no network, so a port on the
sandbox's own loopback is joined to the Unix socket of the API's server. Standard input has JSON: `{"socket", "command",
"folder", "record", "environment", "answer_file"}`. The exit code is that of the command.
"""

import asyncio
import contextlib
import json
import os
import sys
import urllib.request
from functools import partial
from pathlib import Path

BLOCK = 1 << 16
MAX_ANSWER_BYTES = 1 << 20
WORK = Path("/tmp/work")


async def main(given: dict) -> int:
    """Run the command; its exit code."""
    WORK.mkdir(parents=True, exist_ok=True)
    task = WORK.parent / "task.json"
    task.write_text(json.dumps(given["record"]))
    base_url = given["base_url"]
    server = None
    if given["socket"]:
        server = await asyncio.start_server(partial(joined, given["socket"]), "127.0.0.1", 0)
        base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    environment = {
        **os.environ,
        **given["environment"],
        "OPENAI_BASE_URL": base_url,
        "NANODAG_TASK": str(task),
        "HOME": str(WORK),
        "TMPDIR": str(WORK),
    }
    process = await asyncio.create_subprocess_exec(
        *given["command"], stdin=asyncio.subprocess.DEVNULL, cwd=given["folder"] or WORK, env=environment
    )
    code = await process.wait()
    if given["answer_file"]:
        await asyncio.to_thread(send_answer, base_url, given["environment"]["OPENAI_API_KEY"], given["answer_file"])
    return code


async def joined(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes between a connection and the API, in both directions, until both ends have said all."""
    try:
        from_api, to_api = await asyncio.open_unix_connection(path)
    except OSError as error:
        print(f"the API cannot be reached: {error}", file=sys.stderr)
        writer.close()
        return
    await asyncio.gather(passed(reader, to_api), passed(from_api, writer))


async def passed(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """All of one direction."""
    with contextlib.suppress(OSError):
        while block := await source.read(BLOCK):
            sink.write(block)
            await sink.drain()
    with contextlib.suppress(OSError):
        sink.close()


def send_answer(base_url: str, key: str, name: str) -> None:
    """Give a file's text as the answer; one that is not there gives none."""
    path = WORK / name
    if not path.is_file():
        return
    with path.open("rb") as stream:
        text = stream.read(MAX_ANSWER_BYTES).decode(errors="replace")
    request = urllib.request.Request(
        f"{base_url}/answer",
        data=json.dumps({"answer": text}).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


if __name__ == "__main__":
    # No descriptor of the agent's is this program's.
    sys.exit(asyncio.run(main(json.load(sys.stdin))))
