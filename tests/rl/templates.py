"""Chat templates that render as those of well-known models do, and tokenizers that go with them."""

import json
from pathlib import Path

from nanodag.tokenizer import layout
from nanodag.tokenizer.bpe import save_tokenizer, train_bpe
from nanodag.tokenizer.chat import ChatRenderer, load_renderer
from nanodag.tokenizer.train import SAMPLES

# As Qwen2.5's: tools in the system message, calls in <tool_call>, results in <tool_response> of a user's turn.
_DECLARED = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""
_CALL = (
    """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    """{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"""
)
QWEN25 = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else 'You are Qwen.' %}"
    "{{- '<|im_start|>system\\n' + system }}{%- if tools %}{{- '\\n' }}" + _DECLARED + "{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls)"
    " %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
    "{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls %}{{- '\\n' }}" + _CALL + "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}" + _RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# As Qwen3's: thinking stays in the turns after the last question, and is left out of those before it.
QWEN3 = (
    "{%- if tools or messages[0].role == 'system' %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}"
    "{%- if tools %}{{- '\\n' }}" + _DECLARED + "{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(asked=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set thought = m.reasoning_content or '' %}{%- set said = m.content %}"
    "{%- if not thought and '</think>' in said %}"
    "{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}"
    "{%- else %}{{- said }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{%- if said or not loop.first %}{{- '\\n' }}{%- endif %}"
    + _CALL
    + "{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}" + _RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

# As Llama 3.1's: contents are trimmed, one call at a time, bare JSON with `parameters`, tools in the first question.
LLAMA3 = (
    "{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
    "{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}"
    "{%- set messages = messages[1:] %}{%- endif %}"
    "{{- '<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}"
    "{%- elif m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    '{{- \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if tools and loop.first %}{{- 'Given the following functions, respond with JSON.\\n\\n' }}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\\n\\n' }}{%- endfor %}{%- endif %}"
    "{{- (m.content | trim) + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)

# As DeepSeek R1's: thinking is begun by the prompt, and left out of every turn.
FORGETFUL = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

_NAMES = {
    LLAMA3: {
        layout.BOS: "<|begin_of_text|>",
        layout.END: "<|eot_id|>",
        layout.SYSTEM: "<|start_header_id|>",
        layout.USER: "<|end_header_id|>",
    }
}
_CHATML = {layout.BOS: "<|im_start|>", layout.END: "<|im_end|>"}


def renderer_of(template: str | None, folder: Path) -> ChatRenderer:
    """A renderer with a tokenizer of 600 tokens that is made in `folder`; None for our own template."""
    save_tokenizer(train_bpe(iter(SAMPLES.values()), 600), folder)
    if template is not None:
        ours = {name: name for name in (layout.BOS, layout.END)} if layout.END in template else None
        names = ours or _NAMES.get(template, _CHATML)
        layout_path, settings_path = folder / "tokenizer.json", folder / "tokenizer_config.json"
        text = layout_path.read_text()
        for before, after in names.items():
            text = text.replace(before, after)
        layout_path.write_text(text)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": names[layout.BOS],
            "eos_token": names[layout.END],
            "pad_token": layout.PAD,
            "chat_template": template,
        }
        settings_path.write_text(json.dumps(settings))
    return load_renderer(folder)
