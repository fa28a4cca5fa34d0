"""The passage bank: each passage's K/V is computed once behind one fixed prefix, and put into every session that asks.

Beside passages it keeps what else need not be read again: system prompts, and the exchanges that sessions have evicted.

A passage then costs a session no forward pass, and reads the same whatever else the session holds: it sees the prefix,
which is the default system prompt, and itself. Sessions with a prompt of their own are served the same: of 24 questions
under one, 7 were answered right so, and 6 with passages computed behind it (`tests.benchmarks.prefix` is for more).
On the MLX thread.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Generator, Iterator, Sequence

from app.memory.pace import Pace
from app.memory.tiers import Tier, TieredStore
from kv.caches.blockkv import BlockKV
from kv.model.loading import LoadedModel
from kv.session.session import NewBlock, Session

# What stands in place of a document for the K/V of system prompts.
SYSTEM = "system"


class Bank:
    """K/V of passages by what it depends on: model, prefix and the passage's tokens.

    prefix: tokens that every passage is computed behind. prefill_step: most tokens of a forward pass. recompute: first
    tokens of a passage that each session reads anew.
    deleted: documents of which nothing is kept any more.
    """

    def __init__(
        self, model: LoadedModel, store: TieredStore, prefix: Sequence[int], *, prefill_step: int, recompute: int
    ) -> None:
        self.recompute = recompute
        self.store = store
        self._model = model
        self._prefix = list(prefix)
        self._prefill_step = prefill_step
        self.deleted: set[str] = set()

    @property
    def enabled(self) -> bool:
        """Whether there is room for anything."""
        return self.store.enabled

    def key(self, passage: Sequence[int]) -> str:
        """Under what a passage's K/V is kept. passage: its tokens, as a whole message."""
        return self._digest(self._prefix, passage).hex()

    def system_key(self, system: Sequence[int]) -> str:
        """Under what a system prompt's own K/V is kept."""
        return self._digest(system).hex()

    def keep_system(self, system: Sequence[int], kv: BlockKV) -> None:
        """Keep a system prompt's K/V, which begins every session that has it."""
        self.store.put(self.system_key(system), kv, SYSTEM)

    def keep_block(self, block_id: str, session_id: str, kv: BlockKV) -> str:
        """Keep the K/V of a session's own block, as it was in that session. Returns its key."""
        key = hashlib.blake2b(block_id.encode(), digest_size=16).hexdigest()
        self.store.put(key, kv, session_id)
        return key

    def where(self, key: str) -> Tier | None:
        """Which tier has it; None if it must be computed."""
        return self.store.where(key)

    def fetch(self, key: str) -> BlockKV | None:
        """The K/V, if it is there and whole."""
        return self.store.get(key)

    def compute(
        self, key: str, passage: Sequence[int], document_id: str, *, pace: Pace | None = None
    ) -> Generator[int, None, BlockKV]:
        """Compute a passage's K/V and keep it; yields the passage's tokens done after each forward pass.

        pace: nobody has asked for it yet, so it is read in slices of this pace, and is the first to go.
        """
        system, step = self._prefix, self._prefill_step
        session = Session(self._model, budget=len(system) + len(passage), prefill_step=step, score="key_norm")
        before = NewBlock(SYSTEM, system, pinned=True)
        try:
            if (known := self.fetch(self.system_key(system))) is not None:
                session.insert([(before, known)])
            else:
                for _ in self._paced(session, before, pace):
                    yield 0
                self.keep_system(system, session.lift(SYSTEM))
            yield from self._paced(session, NewBlock("passage", passage), pace)
            kv = session.lift("passage")
        finally:
            # Also when the caller stops early.
            session.close()
        if document_id not in self.deleted:
            self.store.put(key, kv, document_id, first_to_go=pace is not None)
        return kv

    @staticmethod
    def _paced(session: Session, block: NewBlock, pace: Pace | None) -> Iterator[int]:
        steps = session.prefill([block])
        if pace is None:
            yield from steps
            return
        done = 0
        while done < len(block.tokens):
            session.prefill_step = pace.tokens
            started = time.monotonic()
            before, done = done, next(steps)
            pace.note(done - before, time.monotonic() - started)
            yield done

    def has_room(self, tokens: int) -> bool:
        """Whether K/V of so many tokens can be kept without anything having to go."""
        return tokens * self._model.kv_bytes_per_token <= self.store.room_bytes

    def remove_document(self, document_id: str) -> None:
        """Forget a document's passages, now and if a turn that still has them is at work."""
        self.deleted.add(document_id)
        self.store.remove(document_id)

    def _digest(self, *parts: Sequence[int]) -> bytes:
        digest = hashlib.blake2b(self._model.fingerprint, digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(array("Q", part).tobytes())
        return digest.digest()
