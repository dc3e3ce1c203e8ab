"""An agent with a subagent and a tool, written with the `openai` package as for any OpenAI server.

The subagent sorts the list in a conversation of its own. The agent itself then calls a tool with a difference, and says
what the tool has found.
"""

import json
import re
from typing import Any

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of a difference, such as 98-17.",
        "parameters": {"type": "object", "properties": {"difference": {"type": "string"}}, "required": ["difference"]},
    },
}


def answer_range(task: Any) -> float:
    """1 where the policy's last word is the range of the list."""
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        question = task.record["messages"][-1]["content"]
        numbers = sorted_by_subagent(client, question.removeprefix("Range: "))
        messages = [{"role": "user", "content": f"Range: {numbers}"}]
        for _ in range(3):
            reply = client.chat.completions.create(model=task.model, messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float((message.content or "").strip() == task.record["answer"])
            call = message.tool_calls[0]
            result = calculate(json.loads(call.function.arguments)["difference"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def sorted_by_subagent(client: openai.OpenAI, numbers: str) -> str:
    """What the policy makes of a list in a conversation that knows nothing of the question."""
    messages = [{"role": "user", "content": f"Sort: {numbers}"}]
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""


def calculate(difference: str) -> str:
    """`98-17` is `81`; `error` for what is no difference of two numbers."""
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", difference)
    return str(int(found[1]) - int(found[2])) if found else "error"
