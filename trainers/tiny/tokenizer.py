r"""Tokenizer of the embedded tiny model: whole words of the mini world, and bytes for all other text.

A word has one token, wherever it stands. Ordinary tokenizers have two tokens for a word: with a space before it, and
without. There, ` Paris` in a passage and `<answer>Paris` in a reply are different tokens, and a model of two million
parameters cannot learn to copy a name that it has never seen. This tokenizer inserts a space at the start and after every
opening character (`> ( [ { " =` and the line break) before it splits the text, and removes these spaces when it decodes.
The rule has no exceptions, so `decode(encode(text)) == text` for any text.

New words are appended, and the ids of old words never change. So weights stay valid when prompts get new words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...agents.text.tokenizing import Tokenizer

OPENING = '\n>([{"='
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SIZE = 2048

WORD_FOLLOWS = r"(?![\p{L}\p{N}])"
PIECES = "|".join(
    (
        r"\n {4}(?= \p{L})",  # a line break and one indent of code
        rf" ?</?[A-Za-z_][A-Za-z0-9_]*/?>(?: {WORD_FOLLOWS})?",  # a tag
        rf"\n(?: {WORD_FOLLOWS})?",
        rf' ?[>(\[{{"=](?: {WORD_FOLLOWS})?',
        r" ?\p{L}[\p{L}\p{N}_]*",
        r" ?\p{N}+",
        r" ?[^\s\p{L}\p{N}]",
        r"\s",
    )
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

if TYPE_CHECKING:
    import tokenizers


def build(words: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a `tokenizers.Tokenizer` whose tokens are the special tokens, the 256 bytes, and these words."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map(_as_bytes, words)]
    if len(set(tokens)) != len(tokens):
        twice = [token for token, count in Counter(tokens).items() if count > 1]
        raise ValueError(f"tokens given twice: {twice[:5]}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*(normalizers.Replace(c, c + " ") for c in OPENING), normalizers.Prepend(" ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), byte_level]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            decoders.Strip(" ", 1, 0),
            *(decoders.Replace(c + " ", c) for c in OPENING),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def as_transformers(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    """Return the tokenizer as an object of transformers, with the chat template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 2048
    tokenizer_with_template: Tokenizer = fast
    return tokenizer_with_template


def known_words(tokenizer: Tokenizer) -> list[str]:
    """Return the words that a tokenizer was built from, in the order of their ids."""
    from tokenizers.pre_tokenizers import ByteLevel

    ids = tokenizer.get_vocab()
    first = len(SPECIAL) + len(ByteLevel.alphabet())
    in_order = sorted((number, token) for token, number in ids.items() if number >= first)
    return [_as_text(token) for _, token in in_order]


def pieces(texts: Iterable[str]) -> Counter[str]:
    """Count the pieces into which the tokenizer splits these texts."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    counts: Counter[str] = Counter()
    for text in texts:
        opened = " " + re.sub(f"([{re.escape(OPENING)}])", r"\1 ", text)
        counts.update(piece for piece, _ in split.pre_tokenize_str(opened))
    return counts


def grow(words: Sequence[str], wanted: Sequence[str], texts: Iterable[str], size: int = SIZE) -> list[str]:
    """Return a longer list of words: `words`, then the new ones of `wanted`, then the most frequent pieces of `texts`.

    `size` is the size of the whole vocabulary. If `words` and `wanted` do not fit, an error is raised.
    """
    room = size - len(SPECIAL) - 256
    grown = dict.fromkeys([*words, *wanted])
    for piece, count in sorted(pieces(texts).items(), key=lambda item: (-item[1], item[0])):
        if len(grown) < room and count > 1 and len(piece.encode()) > 1:
            grown.setdefault(piece)
    if len(grown) > room:
        raise ValueError(f"{len(grown)} words do not fit a vocabulary of {size}")
    return list(grown)


def _as_bytes(piece: str) -> str:
    """Write a piece of text in the byte-level alphabet."""
    from tokenizers.pre_tokenizers import ByteLevel

    whole: list[tuple[str, tuple[int, int]]] = ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(piece)
    return "".join(text for text, _ in whole)


def _as_text(token: str) -> str:
    from tokenizers.decoders import ByteLevel

    return str(ByteLevel().decode([token]))
