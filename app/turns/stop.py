"""Stop strings over a stream: text that might still become one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text through until one of `stops` appears; nothing of it, or after it, comes out.

    Of several, the one that is complete first counts, so that the end does not depend on how the text came in pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown now."""
        if self.hit or not text:
            return ""
        pending = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return pending[: min(found)[1]]
        keep = max((self._overlap(pending, stop) for stop in self._stops), default=0)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
