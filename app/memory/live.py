"""Sessions as the MLX thread holds them: K/V and the table of what is in it; on disk while idle beyond the cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from app.audit.reading import Store
from app.audit.records import BlockRecord, SessionRecord, StoredBlock
from app.memory.snapshots import Snapshots
from ingest.errors import NotFound
from ingest.jobs import now
from ingest.records import StoredPassage
from kv.model.loading import LoadedModel
from kv.session.session import NewBlock, Session


@dataclass
class LiveSession:
    """One session on the MLX thread.

    blocks: resident blocks in stream order, by id. seen_tokens: tokens of all blocks there ever were. stale: blocks
    that SQLite calls resident but that are not in the cache yet. bank_keys: under what the bank keeps the K/V of
    resident blocks, by block. offloaded: passages that left and can be recalled, by passage.
    """

    record: SessionRecord
    cache: Session
    blocks: dict[str, BlockRecord]
    seen_tokens: int
    stale: dict[str, list[int]] = field(default_factory=dict)
    bank_keys: dict[str, str] = field(default_factory=dict)
    offloaded: dict[str, BlockRecord] = field(default_factory=dict)

    @property
    def resident_tokens(self) -> int:
        """Tokens in the cache, and of the blocks still to be restored to it."""
        return self.cache.tokens_kept + sum(len(tokens) for tokens in self.stale.values())

    def to_restore(self) -> list[NewBlock]:
        """The stale blocks, ready to be streamed before anything else."""
        return [
            NewBlock(block_id, tokens, pinned=self.blocks[block_id].kind == "system")
            for block_id, tokens in self.stale.items()
        ]

    def note_restored(self) -> None:
        """Take the blocks that are in the cache whole off the stale list."""
        held = self.cache.block_ids
        self.stale = {block_id: tokens for block_id, tokens in self.stale.items() if block_id not in held}


class LiveSessions:
    """The sessions whose K/V is in memory, most recently used last. snapshots: where those go that are not."""

    def __init__(self, model: LoadedModel, store: Store, snapshots: Snapshots, *, prefill_step: int) -> None:
        self._model = model
        self._store = store
        self.snapshots = snapshots
        self._prefill_step = prefill_step
        self._sessions: dict[str, LiveSession] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of K/V held."""
        return sum(session.cache.nbytes for session in self._sessions.values())

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, record: SessionRecord) -> LiveSession:
        """The session: from memory, from its snapshot, or from SQLite, whose blocks are stale until restored."""
        session = self._sessions.pop(record.id, None)
        if session is None:
            stored = self._store.resident(record.id)
            resident = [block.record.id for block in stored]
            session = self._session(record, stored, self.snapshots.take(record.id, partial(self._load, resident)))
        self._sessions[record.id] = session
        return session

    def _session(self, record: SessionRecord, stored: list[StoredBlock], cache: Session | None) -> LiveSession:
        """A session as SQLite has it, with its resident blocks. Raises NotFound if there are none.

        cache: what holds them; None if all must be restored. What it lacks must be, too.
        """
        if not any(block.record.kind == "system" for block in stored):
            raise NotFound("session", record.id)
        held = set() if cache is None else set(cache.block_ids)
        return LiveSession(
            record=record,
            cache=cache or self._fresh(record),
            blocks={block.record.id: block.record for block in stored},
            seen_tokens=record.seen_tokens,
            stale={block.record.id: block.token_ids for block in stored if block.record.id not in held},
            bank_keys={block.record.id: block.bank_key for block in stored if block.bank_key},
            offloaded={
                block.record.passage_id: block.record
                for block in self._store.offloaded(record.id)
                if block.record.passage_id
            },
        )

    def _fresh(self, record: SessionRecord) -> Session:
        return Session(
            self._model,
            budget=record.budget_tokens,
            prefill_step=self._prefill_step,
            score="key_norm" if record.score == "key_norm" else "attn_mass",
        )

    def _load(self, resident: list[str], path: Path, expected: str) -> Session:
        """The session in a snapshot. Raises ValueError if it is not as SQLite has it: the process stopped in a turn."""
        session = Session.load(self._model, path, path.name.partition(".")[0], expected)
        for block_id in set(session.block_ids) - set(resident):
            # Its document was deleted since. Or the process stopped in a turn: then what that brought in is missing.
            session.evict(block_id)
        if (held := session.block_ids) != resident:
            raise ValueError(f"{path.name}: holds {len(held)} blocks, which are not the {len(resident)} of the session")
        return session

    def documents(self, session_id: str) -> set[str]:
        """Documents of the resident blocks of a session in memory."""
        session = self._sessions.get(session_id)
        return {block.document_id for block in session.blocks.values() if block.document_id} if session else set()

    def evict_document(self, session_id: str, document_id: str) -> None:
        """Evict a document's blocks from a session in memory, after SQLite says that they left."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        for block_id in [id for id, block in session.blocks.items() if block.document_id == document_id]:
            del session.blocks[block_id]
            session.bank_keys.pop(block_id, None)
            if session.stale.pop(block_id, None) is None:
                session.cache.evict(block_id)

    def fork(self, parent: SessionRecord, child: SessionRecord, names: Mapping[str, str]) -> None:
        """Let `child`, a fork by SQLite's books, hold what `parent` holds. names: of the parent's blocks in the fork.

        What has no name in the fork is of turns that it does not take over, and leaves it at once. What of the parent
        must be read again, the fork reads for itself.
        """
        session = self.get(parent)
        if session.stale:
            return
        left = [block_id for block_id in session.blocks if block_id not in names]
        cache = session.cache.fork({**names, **{block_id: block_id for block_id in left}})
        for block_id in left:
            cache.evict(block_id)
        self._sessions[child.id] = self._session(child, self._store.resident(child.id), cache)

    def drop(self, session_id: str) -> None:
        """Free a session's K/V, in memory and on disk."""
        if (session := self._sessions.pop(session_id, None)) is not None:
            session.cache.close()
        self.snapshots.drop(session_id)

    def shrink(self, busy: set[str], room: int) -> list[str]:
        """Move least recently used sessions to disk until those that are not busy take `room` bytes at most.

        Returns their ids.
        """
        idle = {id: session.cache.nbytes for id, session in self._sessions.items() if id not in busy}
        held, moved = sum(idle.values()), []
        for session_id, nbytes in idle.items():
            if held <= room:
                break
            self._snapshot(session_id)
            held -= nbytes
            moved.append(session_id)
        return moved

    def close(self) -> None:
        """Move every session to disk, as far as there is room, for the next process."""
        for session_id in list(self._sessions):
            self._snapshot(session_id)

    def _snapshot(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        if not session.stale:
            self.snapshots.save(session_id, session.cache)
        session.cache.close()


def new_block(
    block_id: str,
    kind: str,
    token_ids: list[int],
    *,
    turn_id: str | None = None,
    turn: int = 0,
    passage: StoredPassage | None = None,
    bank_key: str | None = None,
) -> StoredBlock:
    """A resident block as it is recorded. passage: where it is from, if it is one."""
    record = BlockRecord(
        id=block_id,
        turn_id=turn_id,
        turn=turn,
        kind=kind,
        state="resident",
        tokens=len(token_ids),
        document_id=passage.document_id if passage else None,
        passage_id=passage.id if passage else None,
        name=passage.name if passage else None,
        heading=passage.heading if passage else None,
        score=0.0,
        created_at=now(),
        evicted_at=None,
    )
    return StoredBlock(record=record, token_ids=token_ids, bank_key=bank_key)
