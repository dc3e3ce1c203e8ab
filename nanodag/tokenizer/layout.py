"""Layout of every tokenizer of ours: how text is split, the special tokens, the chat template.

A conversation is `<|bos|>`, then turns. A turn is one role token, its text and `<|end|>`, with nothing else between:

    <|bos|><|system|>Be brief.<|end|><|user|>12*34?<|end|><|assistant|><|tool_call|>12*34<|tool_call_end|>
    <|tool_result|>408<|tool_result_end|>408.<|end|>

(one line in truth). The assistant is trained on its text, on tool calls with their end, and on `<|end|>`, where it
stops; never on tool results. A message of the role `tool` stands between turns as a tool result.
"""

from pathlib import Path

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

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
