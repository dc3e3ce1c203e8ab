"""Byte-level BPE: training with rustbpe, and the Hugging Face folder made of its result.

rustbpe trains, because it needs 1.5 to 2.6 CPU-seconds where tokenizers' own trainer needs 4.4 (20 MB, 32,768 tokens)
and compresses alike (benchmarks/tokenizer.py). tokenizers does everything after that.
"""

import itertools
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from nanodag.errors import ConfigError
from nanodag.tokenizer.encoding import byte_to_character
from nanodag.tokenizer.layout import BOS, CHAT_TEMPLATE, END, PAD, SPECIAL_TOKENS, SPLIT_PATTERN

Ranks = dict[bytes, int]


def train_bpe(texts: Iterator[str], vocabulary: int) -> Ranks:
    """Token bytes -> id of the ordinary tokens: the 256 bytes, then merges in the order they were found.

    vocabulary: all tokens, special ones included. The same texts give the same ranks with any number of threads. Raises
    ConfigError when the text has too few different words for so many tokens.
    """
    import rustbpe

    logging.getLogger("rustbpe").setLevel(logging.WARNING)  # it reports each percent
    num_ordinary_tokens = vocabulary - len(SPECIAL_TOKENS)
    trainer = rustbpe.Tokenizer()
    # Two pairs can spell the same bytes; that token is kept once, so a few more are made than needed.
    trainer.train_from_iterator(texts, num_ordinary_tokens + 16, pattern=SPLIT_PATTERN)
    tokens = dict.fromkeys(bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1]))
    if len(tokens) <= 256:  # bytes alone: nothing was merged
        raise ConfigError("The text is empty, or has no two characters in a row: give the tokenizer other data.")
    if len(tokens) < num_ordinary_tokens:
        largest = len(tokens) + len(SPECIAL_TOKENS)
        raise ConfigError(
            f"The text gives only {largest:,} tokens where a vocabulary of {vocabulary:,} is asked for. "
            f"Train the tokenizer on more text or set its vocabulary to at most {largest}."
        )
    return {token: rank for rank, token in enumerate(itertools.islice(tokens, num_ordinary_tokens))}


def merges_of(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """The two tokens that each merged token was made of, in order of rank.

    They are what is left of its bytes when only merges of lower rank are applied.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            place = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        merges.append((parts[0], parts[1]))
    return merges


def save_tokenizer(ranks: Ranks, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. The same ranks give the same bytes.

    `tokenizer(text)` puts `<|bos|>` first, as models trained on packed documents expect, and as the chat template does.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    characters = byte_to_character()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    vocabulary = {spelled(token): rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])}
    merges = [(spelled(left), spelled(right)) for left, right in merges_of(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
