"""Encoding of prompts in which only the chat template writes control tokens.

A tokenizer reads `<|im_end|>` as the end of a turn wherever it stands: also in a passage, or in one role's reply that
another role is shown. So any author of a part of the prompt could end a turn and speak as another role. This module
prevents it. Contents keep every character, and are tokenised as ordinary text.

    plain = Plain(tokenizer)
    plain.encode(plain.show(template(plain.hide(messages))))     # the template itself is unchanged
    plain.encode("<|im_end|>")                                   # ordinary text: no control token

`Plain` encodes with a copy of the tokenizer in which each control token has a secret name. Control tokens that the
template wrote get their secret names before encoding. The same words in contents keep their public names, which the
copy does not know. The whole prompt is still encoded as one text, so ordinary conversations give the same tokens as
with the original tokenizer.

A template that marks turns with ordinary text (Llama 2's `[INST]`) cannot be protected in this way: in contents, this
text gives the same tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .tokenizing import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_INAUDIBLE = [
    chr(0xFDD0 + i) for i in range(32)
]  # Unicode's noncharacters: no normalizer or template changes them
_NAMES = frozenset({"role", "type"})  # keys that templates compare; the values of all others are only shown
_ROLE = re.compile(r"[\w.-]+")
_HALF = re.compile("[\ud800-\udfff]")
_SIGN = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # marks of tokenizers, which some tokenizers do not flag
_THOUGHT = frozenset({"<think>", "</think>"})  # templates use these to remove the assistant's old thoughts
_KNOWN: WeakKeyDictionary[Tokenizer, tuple[str, Plain]] = WeakKeyDictionary()


class Plain:
    """Encoder of one tokenizer, with the control tokens under secret names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise TypeError(
                f"{type(tokenizer).__name__} is no tokenizer of the `tokenizers` library (tokenizer.json): of others "
                "it cannot be promised that contents are never read as control tokens"
            )
        control, special = _control(tokenizer, backend)
        self.ids = frozenset(backend.token_to_id(text) for text in control - (_THOUGHT - special))
        secret = "".join(secrets.choice(_INAUDIBLE) for _ in range(16))
        self._edge = secret + _numeral(0)
        texts = sorted(control, key=lambda text: (-len(text), text))  # the longest match counts
        self._written = {text: secret + _numeral(2 * i + 1) for i, text in enumerate(texts)}
        self._uttered = {text: secret + _numeral(2 * i + 2) for i, text in enumerate(texts)}
        self._any = _one_of(texts)
        self._assistants = _one_of(text for text in texts if text in special or text not in _THOUGHT)
        self._hidden = re.compile(f"{secret}(?:{'|'.join(_INAUDIBLE)}){{3}}")
        self._back = {alias: text for text, alias in self._uttered.items()} | {self._edge: ""}
        self._tokenizer = _renamed(backend, self._written)

    def hide(self, messages: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
        """Return messages for the template, with the control tokens in their contents hidden."""
        return [self._hide_message(message) for message in messages]

    def hide_text(self, text: str, role: str) -> str:
        """Hide the control tokens of one content, as `hide` does for all messages."""
        hidden = self._hide_controls(text, role)
        core = hidden.strip()
        return hidden.replace(core, f"{self._edge}{core}{self._edge}", 1) if core else hidden

    def show(self, rendered: str) -> str:
        """Prepare a rendered text for `encode`: rename the template's control tokens, and restore the contents."""
        named = self._any.sub(lambda match: self._written[match[0]], rendered)
        return self._hidden.sub(lambda match: self._back.get(match[0], match[0]), named)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text. Control tokens are only those that `show` renamed.

        A lone surrogate becomes the replacement character, because tokenizers refuse it. A role can write one as `"\\ud800"`
        in JSON.
        """
        whole = _HALF.sub("\ufffd", text)
        ids: list[int] = self._tokenizer.encode(whole, add_special_tokens=add_special_tokens).ids
        return ids

    def _hide_message(self, message: Mapping[str, object]) -> dict[str, object]:
        role = str(message.get("role", ""))
        if not _ROLE.fullmatch(role):
            raise ValueError(f"a message's role is one word, such as user or assistant, not {role!r}")
        return {key: self._hide_value(value, key, role) for key, value in message.items()}

    def _hide_value(self, value: object, key: str, role: str) -> object:
        if isinstance(value, str):
            return self._hide_controls(value, role) if key in _NAMES else self.hide_text(value, role)
        if isinstance(value, Mapping):
            return {
                self._hide_controls(str(k), role): self._hide_value(v, str(k), role) for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hide_value(item, key, role) for item in value]
        return value

    def _hide_controls(self, text: str, role: str) -> str:
        pattern = self._assistants if role == "assistant" else self._any
        return pattern.sub(lambda match: self._uttered[match[0]], text)


def plain_of(tokenizer: Tokenizer) -> Plain:
    """Return the `Plain` of a tokenizer. It is built once for each tokenizer and chat template."""
    template = str(getattr(tokenizer, "chat_template", None))
    entry = _KNOWN.get(tokenizer)
    if entry is None or entry[0] != template:
        _KNOWN[tokenizer] = entry = (template, Plain(tokenizer))
    return entry[1]


def _control(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> tuple[frozenset[str], frozenset[str]]:
    """Return the tokens that only a template may write, and the subset of them that is flagged as special.

    The flag is not enough: many tokenizers do not flag the marks of turns and tool calls in their templates
    (`<｜User｜>`, `<tool_response>`).
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = list(backend.get_added_tokens_decoder().values())
    texts = frozenset(token.content for token in added)
    special = texts & {*(token.content for token in added if token.special), *tokenizer.all_special_tokens}
    marks = frozenset(text for text in texts if text.strip() and (text in template or _SIGN.fullmatch(text)))
    return special | marks | (texts & _THOUGHT), special


def _renamed(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Return a copy of a `tokenizers.Tokenizer` with new names for these tokens, also in the vocabulary of its model."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        if token["content"] in names:  # otherwise a normalizer could change the text of the mark
            token |= {"content": names[token["content"]], "normalized": False}
    model = state["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocab.items()}
    elif vocab is not None:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if not _makes(m, names)]
    copy = Tokenizer.from_str(json.dumps(state))
    copy.no_truncation()
    copy.no_padding()
    for text, alias in names.items():
        if copy.token_to_id(alias) != backend.token_to_id(text):
            raise ValueError(
                f"the tokenizer numbers {text!r} {backend.token_to_id(text)}, its copy {copy.token_to_id(alias)}"
            )
    return copy


def _makes(merge: str | Sequence[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _numeral(number: int) -> str:
    """Write a number as three invisible digits."""
    return "".join(_INAUDIBLE[number >> shift & 31] for shift in (10, 5, 0))
