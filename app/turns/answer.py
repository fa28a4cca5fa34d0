"""An answer as it is written: what of it is shown, when it ends, and which tokens say exactly what was shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.turns.events import FinishReason
from app.turns.repeats import Repeats
from app.turns.stop import StopText
from kv.model.text import TextCodec


@dataclass(frozen=True)
class Written:
    """A finished answer. text: as shown. token_ids: they decode to `text`, and the first `whole` were generated."""

    text: str
    token_ids: list[int]
    whole: int
    reason: FinishReason


@dataclass
class AnswerText:
    """Takes the generated tokens of one answer.

    codec: decodes them. stops: strings that end the answer before them. max_tokens: most tokens taken.
    may_loop: whether it may go on saying the same.
    """

    codec: TextCodec
    stops: Sequence[str]
    max_tokens: int
    may_loop: bool = False
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self._stream = self.codec.stream()
        self._stop = StopText(self.stops)
        self._repeats = Repeats()
        self._shown: list[str] = []
        self._characters = 0
        # (tokens, characters) at each token that ended on a whole character: where the answer may be cut.
        self._borders = [(0, 0)]

    def push(self, token: int) -> str:
        """The text that can be shown now, which may be empty. Sets `reason` when the answer must end here."""
        self.token_ids.append(token)
        delta = self._stream.push(token)
        if delta:
            self._characters += len(delta)
            self._borders.append((len(self.token_ids), self._characters))
        shown = self._show(self._stop.push(delta))
        looping = self._repeats.push(token) and not self.may_loop
        if self._stop.hit:
            self.reason = "stop"
        elif looping:
            self.reason = "repetition"
        elif len(self.token_ids) == self.max_tokens:
            self.reason = "length"
        return shown

    def flush(self) -> str:
        """The text that was held back in case a stop string followed, now that nothing does."""
        return self._show(self._stop.flush())

    def finish(self, reason: FinishReason) -> Written:
        """The answer as it stands. A cache and a history that hold its tokens agree with what the client saw.

        The generated tokens are kept up to the last border inside the shown text; the rest is encoded again.
        """
        text = "".join(self._shown)
        # A border is no good if a model wrote bytes that are no text before it: those were not shown.
        whole, length = next(
            border
            for border in reversed(self._borders)
            if border[1] <= len(text) and self.codec.decode(self.token_ids[: border[0]]) == text[: border[1]]
        )
        rest = self.codec.encode(text[length:])
        return Written(text=text, token_ids=[*self.token_ids[:whole], *rest], whole=whole, reason=reason)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
