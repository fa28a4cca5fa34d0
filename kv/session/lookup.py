"""Drafts of an answer's next tokens: answers copy their passages, so what followed the last tokens there may again.

Prompt-lookup decoding (Saxena 2023; transformers' `prompt_lookup_num_tokens`, vLLM's n-gram proposer): no second
model, no training. The model reads a token and the draft of what follows in one pass, and only what it would have
chosen itself is accepted, so that an answer is the same with and without: speculative decoding (arXiv:2211.17192) whose
draft gives all probability to one token, so that to accept it is to have chosen it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# So many tokens must have been read before for what followed them to be a draft. The longest are looked for first.
_LONGEST, _SHORTEST = 4, 2
# Tokens of a first draft. After more failures than that, none for so many tokens.
_AT_FIRST, _FAILURES, _REST = 1, 3, 8


class PromptLookup:
    """Drafts for one answer, from a text.

    text: tokens that the answer may repeat, in the order in which they were read. most: of a draft; 0 for none.
    drafted, accepted: how many tokens were fed so far, and how many of them the model has confirmed.
    """

    def __init__(self, text: Sequence[int], most: int) -> None:
        self.drafted = self.accepted = 0
        self._most = most
        self._count = min(_AT_FIRST, most)
        self._failures = self._rest = 0
        self._text = np.empty(len(text) + 64, dtype=np.int32)
        self._text[: len(text)] = text
        self._length = len(text)

    def push(self, token: int) -> None:
        """Take a token of the answer in."""
        if self._length == len(self._text):
            self._text = np.concatenate([self._text, np.empty_like(self._text)])
        self._text[self._length] = token
        self._length += 1

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may follow; none where the last ones are new, or drafts have not paid."""
        if self._rest:
            self._rest -= 1
            return []
        most = min(most, self._count)
        text = self._text[: self._length]
        if most < 1 or len(text) <= _SHORTEST:
            return []
        # Where what equals the last tokens ends; without the last one itself.
        ends = np.flatnonzero(text[:-1] == text[-1])
        size = 1
        while size < _LONGEST and len(ends):
            longer = ends[ends >= size]
            longer = longer[text[longer - size] == text[-1 - size]]
            if not len(longer):
                break
            ends, size = longer, size + 1
        if size < _SHORTEST or not len(ends):
            return []
        # The newest: it is what is talked about.
        after = ends[-1] + 1
        return [int(token) for token in text[after : after + most]]

    def note(self, drafted: int, accepted: int) -> None:
        """Be told how many tokens of a draft were fed, and how many of those were accepted."""
        if not drafted:
            return
        self.drafted += drafted
        self.accepted += accepted
        self._count = min(self._most, 2 * self._count + 1 if accepted == drafted else accepted + 1)
        self._failures = 0 if accepted else self._failures + 1
        if self._failures > _FAILURES:
            self._rest, self._failures = _REST, 0
