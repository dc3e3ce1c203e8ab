"""Chat templates in few words that write tool calls as those of well-known families do."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanodag.tokenizer.call_format import PROBED, CallFormat, call_format


def template(call: str, *, begin: str = "", between: str = "", end: str = "", stop: str = "<|end|>") -> str:
    """A template of roles in marks. call: how one is written, `name` and `args` being its parts; begin, between, end:
    around all of an answer's calls."""
    return (
        "{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{%- endif %}"
        "{%- for m in messages %}{{- '<|' + m.role + '|>' }}{{- m.content }}"
        "{%- if m.tool_calls %}{{- '" + begin + "' }}{%- for c in m.tool_calls %}{%- set name = c.function.name %}"
        "{%- set args = c.function.arguments %}{%- if not loop.first %}{{- '" + between + "' }}{%- endif %}"
        + call
        + "{%- endfor %}{{- '" + end + "' }}{%- endif %}{{- '" + stop + "' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    )  # fmt: skip


_EACH = "{%- for key, value in args.items() %}"
_TEXT = "{%- set text = value if value is string else value | tojson %}"
_OBJECT = """{{- '{"name": "' + name + '", "arguments": ' + (args | tojson) + '}' }}"""
HERMES = template("{{- '<tool_call>\\n' }}" + _OBJECT + "{{- '\\n</tool_call>' }}", between="\\n")
LLAMA = template("""{{- '{"name": "' + name + '", "parameters": ' + (args | tojson) + '}' }}""")
LISTED = template(_OBJECT, begin="[TOOL_CALLS] [", between=", ", end="]")
CODER = template(
    "{{- '<tool_call>\\n<function=' + name + '>\\n' }}" + _EACH + _TEXT
    + "{{- '<parameter=' + key + '>\\n' + text + '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}",
    between="\\n",
)  # fmt: skip
GLM = template(
    "{{- '\\n<tool_call>' + name + '\\n' }}" + _EACH + _TEXT
    + "{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + text + '</arg_value>\\n' }}{%- endfor %}"
    "{{- '</tool_call>' }}",
)  # fmt: skip
INVOKED = template(
    """{{- '<invoke name="' + name + '">\\n' }}""" + _EACH + _TEXT
    + """{{- '<parameter name="' + key + '">' + text + '</parameter>\\n' }}{%- endfor %}{{- '</invoke>\\n' }}""",
    begin="<minimax:tool_call>\\n", end="</minimax:tool_call>",
)  # fmt: skip
DEEPSEEK = template(
    "{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n' + (args | tojson) }}"
    "{{- '\\n```<｜tool▁call▁end｜>' }}",
    begin="<｜tool▁calls▁begin｜>",
    between="\\n",
    end="<｜tool▁calls▁end｜>",
)
HARMONY = template(
    "{%- if loop.first %}{{- ' to=functions.' + name + '<|channel|>commentary json<|message|>' + (args | tojson) }}"
    "{%- endif %}",
    stop="<|call|>",
)
MISTRAL = template("{{- '[TOOL_CALLS]' + name + '[ARGS]' + (args | tojson) }}")
GEMMA = template(
    "{{- '<|tool_call>call:' + name + '{' }}" + _EACH
    + """{{- key + ':' + ('<|"|>' + value + '<|"|>' if value is string else value | tojson) }}"""
    "{%- if not loop.last %},{%- endif %}{%- endfor %}{{- '}<tool_call|>' }}",
)  # fmt: skip
PYTHONIC = template(
    "{{- name + '(' }}" + _EACH
    + '''{{- key + "=" + ("'" + value + "'" if value is string else value | string) }}'''
    "{%- if not loop.last %}, {%- endif %}{%- endfor %}{{- ')' }}",
    begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>",
)  # fmt: skip
SHAPES = {
    "hermes": HERMES, "llama": LLAMA, "listed": LISTED, "coder": CODER, "glm": GLM, "invoked": INVOKED,
    "deepseek": DEEPSEEK, "harmony": HARMONY, "mistral": MISTRAL, "gemma": GEMMA, "pythonic": PYTHONIC,
}  # fmt: skip


def render_of(text: str) -> Callable[[Sequence[Mapping[str, Any]], bool], str]:
    """What renders messages with PROBED declared, as transformers does."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    made = environment.from_string(text)
    return lambda messages, is_open: made.render(messages=messages, tools=[PROBED], add_generation_prompt=is_open)


def format_of(text: str) -> CallFormat:
    found = call_format(render_of(text))
    assert found is not None, text
    return found
