"""Token counters that can be handed to another process."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from tokenizers import Tokenizer


class CounterRecipe(msgspec.Struct, frozen=True):
    """How to make a `TokenizerCounter`. tokenizer: its JSON."""

    tokenizer: str
    control_ids: list[int]

    def counter(self) -> TokenizerCounter:
        """The counter."""
        return TokenizerCounter(Tokenizer.from_str(self.tokenizer), self.control_ids)


class TokenizerCounter:
    """Counts as a Hugging Face tokenizer does, here or wherever its recipe is sent.

    control_ids: tokens that ordinary text never becomes; text that spells one is counted character by character.
    Safe to use from several threads.
    """

    def __init__(self, tokenizer: Tokenizer, control_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._control_ids = frozenset(control_ids)

    def __call__(self, text: str) -> int:
        """How many tokens `text` has."""
        ids = self._ids(text)
        if self._control_ids.isdisjoint(ids):
            return len(ids)
        return sum(id not in self._control_ids for character in text for id in self._ids(character))

    @property
    def recipe(self) -> CounterRecipe:
        """What to send."""
        return CounterRecipe(self._tokenizer.to_str(), sorted(self._control_ids))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
