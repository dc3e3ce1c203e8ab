"""Layout of every tokenizer of ours: how text is split, the special tokens, the chat template.

A conversation is `<|bos|>`, then turns. A turn is one role token, its text and `<|end|>`, with nothing else between:

    <|bos|><|system|>Be brief.<|end|><|user|>12*34?<|end|><|assistant|><|tool_call|>12*34<|tool_call_end|>
    <|tool_result|>408<|tool_result_end|>408.<|end|>

(one line in truth). The assistant is trained on its text, on tool calls with their end, and on `<|end|>`, where it
stops; never on tool results. A message of the role `tool` stands between turns as a tool result.
"""

BOS = "<|bos|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
TOOL_CALL = "<|tool_call|>"
TOOL_CALL_END = "<|tool_call_end|>"
TOOL_RESULT = "<|tool_result|>"
TOOL_RESULT_END = "<|tool_result_end|>"

# Their ids are the last ones of the vocabulary, in this order.
SPECIAL_TOKENS = (BOS, PAD, SYSTEM, USER, ASSISTANT, END, TOOL_CALL, TOOL_CALL_END, TOOL_RESULT, TOOL_RESULT_END)

# GPT-4's split, with numbers in groups of at most two digits instead of three: a small vocabulary has no room for 1,000
# numbers. Source: openai/tiktoken, cl100k_base.
SPLIT_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",  # English contractions
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",  # a word with the space or mark before it
        r"\p{N}{1,2}",  # digits
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",  # punctuation with the line ends after it
        r"\s*[\r\n]",  # blank lines
        r"\s+(?!\S)",  # spaces but the last one before a word
        r"\s+",
    )
)

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|assistant|>' -}}
    {%- if message.content is string -%}
      {%- generation -%}{{- message.content -}}{{- '<|end|>' -}}{%- endgeneration -%}
    {%- else -%}
      {%- for part in message.content -%}
        {%- if part.type == 'text' -%}
          {%- generation -%}{{- part.text -}}{%- endgeneration -%}
        {%- elif part.type == 'tool_call' -%}
          {%- generation -%}{{- '<|tool_call|>' + part.text + '<|tool_call_end|>' -}}{%- endgeneration -%}
        {%- elif part.type == 'tool_result' -%}
          {{- '<|tool_result|>' + part.text + '<|tool_result_end|>' -}}
        {%- else -%}
          {{- raise_exception('A part is of type text, tool_call or tool_result; found ' + part.type) -}}
        {%- endif -%}
      {%- endfor -%}
      {%- generation -%}{{- '<|end|>' -}}{%- endgeneration -%}
    {%- endif -%}
  {%- elif message.content is not string -%}
    {{- raise_exception('The content of a ' + message.role + ' message must be a string') -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|tool_result|>' + message.content + '<|tool_result_end|>' -}}
  {%- elif message.role in ('system', 'user') -%}
    {{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}
  {%- else -%}
    {{- raise_exception('Roles are system, user, assistant and tool; found ' + message.role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""
