"""Interface of the tokenizers that unitymas uses: those of transformers, loaded from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, overload

ChatMessages = Sequence[Mapping[str, object]]


class Tokenizer(Protocol):
    """Interface of transformers' tokenizers: text to token ids and back, and the chat template."""

    chat_template: str | None
    eos_token_id: int
    pad_token_id: int
    all_special_tokens: list[str]

    def __hash__(self) -> int: ...

    def __len__(self) -> int: ...

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of ids."""
        ...

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], *, clean_up_tokenization_spaces: bool | None = None
    ) -> list[str]:
        """Return the text of each sequence."""
        ...

    @overload
    def apply_chat_template(
        self, conversation: ChatMessages, *, add_generation_prompt: bool, tokenize: Literal[False]
    ) -> str:
        """Return the text that the template makes."""
        ...

    @overload
    def apply_chat_template(
        self, conversation: ChatMessages, *, add_generation_prompt: bool, return_dict: Literal[False]
    ) -> list[int]:
        """Return the ids of the rendered text."""
        ...

    @overload
    def apply_chat_template(
        self, conversation: ChatMessages, *, add_generation_prompt: bool
    ) -> Mapping[str, list[int]]:
        """Return a mapping with the ids as `input_ids`, and the attention mask."""
        ...

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int:
        """Return the id of one token."""
        ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        """Return the id of each token."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""
        ...

    def save_pretrained(self, save_directory: Path) -> object:
        """Write the tokenizer's files."""
        ...
