"""Text to tokens and back, for streams: ordinary text never becomes a control token, deltas never tear a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"
# No character of any known tokenizer takes more tokens than this; a longer wait means the bytes are not text.
_LONGEST_CHARACTER = 8


class TextCodec:
    """Encodes and decodes with a Hugging Face fast tokenizer.

    tokenizer: a `PreTrainedTokenizerFast`, or mlx-lm's wrapper around one.
    plain: the tokenizer of ordinary text. control_ids: the tokens that `encode` takes out where it spells one even so.
    Safe to use from several threads.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} has no fast tokenizer; convert the model's tokenizer first")
        self._markup = backend
        # A tokenizer that was never told of the added tokens cannot produce one from ordinary text.
        description = json.loads(backend.to_str())
        self.control_ids = frozenset(token["id"] for token in description["added_tokens"])
        self.special_ids = frozenset(t["id"] for t in description["added_tokens"] if t["special"])
        description["added_tokens"] = []
        description["post_processor"] = None
        self.plain = Tokenizer.from_str(json.dumps(description))
        # Most bytes that one token can stand for: its spelling has at least one character a byte.
        self._longest = max(len(piece.encode()) for piece in self.plain.get_vocab())

    def encode(self, text: str) -> list[int]:
        """Tokens of ordinary text: whatever it spells, none of them is a control token."""
        ids: list[int] = self.plain.encode(text, add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # A vocabulary may hold a control token's spelling as an ordinary entry; single characters cannot match it.
        return [
            token
            for character in text
            for token in self.plain.encode(character, add_special_tokens=False).ids
            if token not in self.control_ids
        ]

    def encode_markup(self, text: str) -> list[int]:
        """Tokens of the chat template's own text, control tokens included."""
        ids: list[int] = self._markup.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, without control tokens."""
        text: str = self._markup.decode(list(ids), skip_special_tokens=True)
        return text

    def least(self, text: str) -> int:
        """Tokens that `text` has at the very least, by its length alone: to refuse the hopeless without encoding it."""
        return len(text.encode(errors="replace")) // self._longest

    def stream(self) -> TextStream:
        """A decoder for one answer."""
        return TextStream(self)


class TextStream:
    """Decodes tokens one by one; the deltas join to the decoded text, and none ends inside a character."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        # Tokens before `_read` are out. Decoding starts at `_prefix`, since some decoders treat a first word apart.
        self._prefix = 0
        self._read = 0

    @property
    def complete(self) -> int:
        """How many tokens the deltas so far cover."""
        return self._read

    def push(self, token: int) -> str:
        """The text that this token completes, which may be empty."""
        self._ids.append(token)
        before = self._codec.decode(self._ids[self._prefix : self._read])
        after = self._codec.decode(self._ids[self._prefix :])
        if after.endswith(_INCOMPLETE) and len(self._ids) - self._read <= _LONGEST_CHARACTER:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        # What is left of it stands for bytes that are not text; an answer is text.
        return after[len(before) :].replace(_INCOMPLETE, "")
