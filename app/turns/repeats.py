"""An answer that only repeats itself: found while it is written, so that it can be ended."""

from __future__ import annotations

# A loop of so many tokens is seen; models loop over sentences, lists and single words.
_LONGEST = 128
# What was said three times is a loop, if that is enough text: rows of a table are alike too.
_TIMES, _TOKENS = 3, 48


class Repeats:
    """Takes the tokens of one answer."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # How many of the last tokens equal the one so many places before them, by that distance.
        self._runs = [0] * (_LONGEST + 1)

    def push(self, token: int) -> bool:
        """Whether the answer ends in a loop with this token."""
        looping = False
        runs, tokens = self._runs, self._tokens
        for period in range(1, min(_LONGEST, len(tokens)) + 1):
            if tokens[-period] != token:
                runs[period] = 0
                continue
            runs[period] += 1
            looping |= runs[period] + period >= max(_TIMES * period, _TOKENS)
        tokens.append(token)
        return looping
