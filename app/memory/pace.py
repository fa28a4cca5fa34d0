"""Work in slices of a time: how many tokens that is changes with the machine, and with what else it does."""

from __future__ import annotations

_FEWEST, _MOST = 8, 256
# A slow slice counts at once, a fast one only in part: one of the two makes somebody wait.
_GROWTH = 1.5


class Pace:
    """How many tokens to take at a time. seconds: what a slice is to take. most: tokens that it never passes."""

    def __init__(self, seconds: float, most: int = _MOST) -> None:
        self.tokens = min(2 * _FEWEST, most)
        self._seconds = seconds
        self._most = most

    def note(self, tokens: int, seconds: float) -> None:
        """Say how long a slice took."""
        if tokens < self.tokens and seconds < self._seconds:
            # The end of something: says little.
            return
        fitting = tokens * self._seconds / max(seconds, 1e-6)
        self.tokens = int(max(_FEWEST, min(fitting, self.tokens * _GROWTH, self._most)))
