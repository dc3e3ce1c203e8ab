"""Agents that do as they should: each asks the policy by OpenAI's API, in a process that finds it by this module's
name."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

TOOL = {"type": "function", "function": {"name": "shout", "parameters": {"properties": {"text": {"type": "string"}}}}}


def request(task, path, data, key="", method="POST"):
    headers = {"Authorization": f"Bearer {key or task.api_key}", "Content-Type": "application/json"}
    return urllib.request.Request(task.base_url + path, data, headers, method=method)


def post(task, path, body, key=""):
    """The answer, or the code with which it is refused."""
    try:
        with urllib.request.urlopen(request(task, path, json.dumps(body).encode(), key), timeout=30) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["code"]


def said(task, messages, **more):
    return post(task, "/chat/completions", {"model": "gpt-9", "messages": messages, **more})["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def with_subagent(task):
    """A call of a tool whose result another conversation gives."""
    messages = [user("main")]
    first = said(task, messages, tools=[TOOL], temperature=0.1, seed=3)
    text = json.loads(first["tool_calls"][0]["function"]["arguments"])["text"]
    other = said(task, [user("sub " + text)])["content"]
    result = {"role": "tool", "content": other, "tool_call_id": first["tool_calls"][0]["id"]}
    last = said(task, [*messages, first, result], tools=[TOOL])
    return 0.5, {"length": len(last["content"])}


def forms(task):
    """Several choices, a stop string, a stream, texts, and what a policy cannot be asked."""
    two = post(task, "/chat/completions", {"messages": [user("two")], "n": 2})["choices"]
    cut = said(task, [user("cut")], stop=["y", "q"])["content"]
    short = said(task, [user("short")], max_tokens=1)["content"]
    body = json.dumps({"messages": [user("stream")], "stream": True}).encode()
    with urllib.request.urlopen(request(task, "/chat/completions", body)) as reply:
        events = [json.loads(line[6:]) for line in reply if line.startswith(b"data: {")]
    stream = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    text = post(task, "/completions", {"prompt": "ab", "max_tokens": 2})["choices"][0]["text"]
    more = post(task, "/completions", {"prompt": "ab" + text + "cd", "max_tokens": 1})["choices"][0]["text"]
    odd = ({"tool_choice": "required", "tools": [TOOL]}, {"top_logprobs": 2, "logprobs": True}, {"min_p": 0.5})
    refused = [post(task, "/chat/completions", {"messages": [user("?")], **one}) for one in odd]
    return json.dumps([sorted(one["message"]["content"] for one in two), cut, short, stream, text, more, refused])


def named(task):
    """The name of a call, which some chat templates render."""
    return said(task, [user("main")], tools=[TOOL], parallel_tool_calls=False)["tool_calls"][0]["id"]


def late(task):
    """What the key of the sample before it does, and what one that nobody gave does; the prompt's answer names the file
    that has the keys."""
    with open(task.record["answer"], "a+") as file:
        file.seek(0)
        keys = file.read().split()
        file.write(f"{task.api_key}\n")
    assert all(post(task, "/answer", {"answer": answer}) is None for answer in (3, "x" * (1 << 21)))
    codes = [post(task, "/chat/completions", {"messages": [user("?")]}, key) for key in [*keys[-1:], "nanodag-x"]]
    said(task, [user("!")])
    return json.dumps(codes)


def greedy(task):
    """Calls until it is refused."""
    messages = [user("go")]
    while True:
        messages += [said(task, messages), user("more")]


def compacts(task):
    """Calls until there is no room, then begins with less."""
    try:
        greedy(task)
    except TypeError:  # a refusal is no answer
        return said(task, [user("in short")])["content"]


def killed(task):
    """Killed in the middle, the first two times, which the file counts that the prompt's answer names."""
    said(task, [user("go")])
    with open(task.record["answer"], "a") as times:
        times.write("x")
        times.flush()
        if times.tell() < 3:
            os.kill(os.getpid(), 9)
    return said(task, [user("on")])["content"]


def three_at_once(task):
    def ask(name):
        messages = [user(name)]
        messages += [said(task, messages), user("and")]
        return said(task, messages)["content"]

    with ThreadPoolExecutor() as threads:
        return " ".join(threads.map(ask, "abc"))


def lasting(task):
    """Leaves the ids of its processes in a file, one of a session of its own, and does not end."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with open(task.record["path"], "w") as file:
        file.write(f"{os.getppid()} {os.getpid()} {child.pid}")
    time.sleep(300)
