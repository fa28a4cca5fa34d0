"""The MLX thread: it loads the model and runs every operation on it.

Turns that answer decode together, a token and its draft each in one pass; between such passes one turn that reads takes
one slice.

The event loop hands turns in and gets events back through a queue; neither side ever waits for the other.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import structlog

from app.audit import writing
from app.audit.reading import Store
from app.audit.records import Move, SessionRecord
from app.memory.ahead import Ahead
from app.memory.bank import SYSTEM, Bank
from app.memory.live import LiveSessions
from app.memory.snapshots import Snapshots
from app.memory.tiers import Moved, TieredStore
from app.problems import as_problem
from app.settings import Settings
from app.turns.events import Failed
from app.turns.handle import TurnHandle
from app.turns.plan import DoesNotFit
from app.turns.prompts import default_system
from app.turns.turn import Steps, Turn
from ingest.database import Database
from ingest.jobs import new_id, now
from kv.model.loading import LoadedModel
from kv.session.together import run_together

T = TypeVar("T")
log = structlog.get_logger()

_STOP_SECONDS = 20.0
_MB = 1_000_000

# Buffers grow by so many rows at a time.
_SPARE_ROWS = 64
# Rows of a pass that share what drafts may add: beyond as many, weights are read once more on a CPU.
_DRAFT_ROWS = 8


@dataclass
class _Running:
    """A turn at work. run: a token and a draft that it wants to have fed next; None while it reads."""

    turn: Turn
    steps: Steps
    run: list[int] | None = None


@dataclass(frozen=True)
class Figures:
    """What the MLX thread has to do, and what it holds in memory, in bytes. mlx_bytes: all arrays, the model's too."""

    turns_at_work: int = 0
    turns_waiting: int = 0
    sessions_in_memory: int = 0
    session_kv_bytes: int = 0
    bank_kv_bytes: int = 0
    kv_limit_bytes: int = 0
    mlx_bytes: int = 0


@dataclass
class _Call:
    function: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def __post_init__(self) -> None:
        # Whoever waited may leave: what was asked is done all the same.
        self.future.set_running_or_notify_cancel()


class Engine:
    """The MLX thread and what lives on it.

    load: loads the model, on the thread. `loaded` resolves to it, or to what went wrong.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        database: Database,
        settings: Settings,
    ) -> None:
        self.loaded: Future[LoadedModel] = Future()
        self._load = load
        self._database = database
        self._settings = settings
        self._inbox: queue.SimpleQueue[TurnHandle | _Call | None] = queue.SimpleQueue()
        self._waiting: deque[TurnHandle] = deque()
        self._running: dict[TurnHandle, _Running] = {}
        self._kv_bytes_per_token = 0
        self._ahead: Ahead | None = None
        # Documents that were ingested before anyone said how to read them.
        self._ingested: list[str] = []
        self.figures = Figures()
        self._sessions: LiveSessions | None = None
        self._bank: Bank | None = None
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self._thread.start()

    def submit(self, handle: TurnHandle) -> None:
        """Queue a turn."""
        self._inbox.put(handle)

    def forget(self, session_id: str) -> Future[None]:
        """Free all K/V of a session that is deleted."""

        def forget() -> None:
            self._live().drop(session_id)
            self._passages().store.remove(session_id)

        return self._call(forget)

    def forget_document(self, document_id: str) -> Future[None]:
        """Drop a deleted document's K/V from the bank, and its blocks from every session.

        Sessions in which a turn is at work are dealt with when it is over.
        """

        def forget() -> None:
            self._passages().remove_document(document_id)
            self._evict_document(document_id)

        return self._call(forget)

    def read_ahead(self, passages_of: Callable[[str], Iterable[list[int]]]) -> None:
        """Begin to read ingested documents into the bank while idle. passages_of: see `Ahead`."""

        def begin() -> None:
            self._ahead = Ahead(self._passages(), passages_of, most_tokens=self._settings.prefill_step)
            for document_id in self._ingested:
                self._ahead.add(document_id)

        self._call(begin)

    def note_ingested(self, document_id: str) -> None:
        """Say that a document's passages can be asked for. Safe from any thread."""
        self._call(lambda: (self._ahead.add if self._ahead else self._ingested.append)(document_id))

    def fork(self, parent: SessionRecord, child: SessionRecord, names: Mapping[str, str]) -> Future[None]:
        """Let a session that was recorded as a fork share its parent's K/V. names: as `Session.fork` takes them."""

        def fork() -> None:
            self._live().fork(parent, child, names)
            self._shrink()

        return self._call(fork)

    def keep_owners(self, known: Set[str]) -> Future[None]:
        """Drop K/V, in the bank and in snapshots, that is of none of these documents and sessions."""

        def keep() -> None:
            self._passages().store.keep_owners(known | {SYSTEM})
            self._live().snapshots.keep(known)

        return self._call(keep)

    @property
    def alive(self) -> bool:
        """Whether the MLX thread is there to do anything."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Cancel every turn, let each commit or roll back, and end the thread."""
        self._inbox.put(None)
        self._thread.join(_STOP_SECONDS)

    # On the MLX thread

    def _call(self, function: Callable[[], T]) -> Future[T]:
        call = _Call(function)
        self._inbox.put(call)
        return call.future

    def _live(self) -> LiveSessions:
        assert self._sessions is not None
        return self._sessions

    def _passages(self) -> Bank:
        assert self._bank is not None
        return self._bank

    def _run(self) -> None:
        try:
            model = self._load()
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        settings = self._settings
        self._sessions = LiveSessions(
            model,
            Store(self._database),
            Snapshots(settings.folder / "sessions", max_bytes=settings.snapshot_disk_mb * _MB),
            prefill_step=settings.prefill_step,
        )
        store = TieredStore(
            settings.folder / "bank",
            memory_bytes=settings.bank_memory_bytes,
            disk_bytes=settings.bank_disk_mb * _MB,
            on_move=self._note_move,
        )
        self._bank = Bank(
            model,
            store,
            default_system(model.template),
            prefill_step=settings.prefill_step,
            recompute=settings.bank_recompute,
        )
        kept = store.keys
        self._database.write(lambda db: writing.drop_offloaded(db, kept))
        self._kv_bytes_per_token = model.kv_bytes_per_token
        if (most := self._most_bytes(settings.budget_tokens)) > settings.session_memory_bytes:
            log.warning(
                "one session of the default budget may take more than all may: such turns run one by one",
                session_mb=most // _MB,
                sessions_mb=settings.session_memory_bytes // _MB,
            )
        self.loaded.set_result(model)
        stopping = False
        while not (stopping and not self._running and not self._waiting):
            ahead = self._ahead if self._ahead and self._ahead.pending and not stopping else None
            stopping = self._take_in(block=not self._running and not self._waiting and not ahead) or stopping
            self._admit(stopping)
            if ahead and not self._running and not stopping:
                ahead.step()
            for handle, running in self._running.items():
                running.turn.residency.cancelled = handle.cancelled or stopping
            self._round()
            self._note_figures()
        store.close()
        self._sessions.close()

    def _note_move(self, moved: Moved) -> None:
        kind = moved.owner.partition("_")[0]
        move = Move(
            id=new_id("mov"),
            bank_key=moved.key,
            document_id=moved.owner if kind == "doc" else None,
            session_id=moved.owner if kind == "ses" else None,
            tokens=moved.tokens,
            bytes=moved.nbytes,
            source=moved.source,
            target=moved.target,
            reason=f"{'session' if kind == 'ses' else 'document'}_deleted"
            if moved.reason == "deleted"
            else moved.reason,
            blocks_dropped=0,
            created_at=now(),
        )
        self._database.write(lambda db: writing.insert_move(db, move))

    def _take_in(self, block: bool) -> bool:
        """Start what waits in the inbox. Returns True when it says to stop."""
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return False
            block = False
            if item is None:
                return True
            if isinstance(item, TurnHandle):
                self._waiting.append(item)
            else:
                try:
                    item.future.set_result(item.function())
                except Exception as error:
                    log.error("a call to the MLX thread failed", exc_info=error)
                    item.future.set_exception(error)

    def _most_bytes(self, budget_tokens: int) -> int:
        """What the K/V of a session of that budget may come to take."""
        return self._kv_bytes_per_token * (budget_tokens + _SPARE_ROWS)

    def _reserved(self) -> int:
        """What sessions with turns at work may come to take."""
        return sum(self._most_bytes(handle.request.session.budget_tokens) for handle in self._running)

    def _admit(self, stopping: bool) -> None:
        """Start turns in the order they came, as long as their sessions can grow to their budgets under the cap.

        One may always start that has nobody to wait for; those that were cancelled start, to end at once.
        """
        for handle in list(self._waiting):
            most = self._most_bytes(handle.request.session.budget_tokens)
            fits = not self._running or self._reserved() + most <= self._settings.session_memory_bytes
            if stopping or handle.cancelled or (fits and handle is self._waiting[0]):
                self._waiting.remove(handle)
                self._start(handle)

    def _note_figures(self) -> None:
        self.figures = Figures(
            turns_at_work=len(self._running),
            turns_waiting=len(self._waiting),
            sessions_in_memory=len(self._live()),
            session_kv_bytes=self._live().nbytes,
            bank_kv_bytes=self._passages().store.memory_bytes,
            kv_limit_bytes=self._settings.kv_memory_mb * _MB,
            mlx_bytes=mx.get_active_memory(),
        )

    def _start(self, handle: TurnHandle) -> None:
        request = handle.request
        try:
            # Before it is read in, if it waits on disk.
            self._shrink(request.session)
            live = self._live().get(request.session)
            turn = Turn(
                request,
                live,
                self._passages(),
                self._database,
                handle.put,
                draft_tokens=self._settings.draft_tokens,
            )
            self._running[handle] = _Running(turn, turn.run())
        except Exception as error:
            self._fail(handle, error)

    def _shrink(self, starting: SessionRecord | None = None) -> None:
        """Hold idle sessions to what the cap leaves beside those at work, and the one that is to be."""
        busy = {handle.request.session.id for handle in self._running}
        reserved = self._reserved()
        if starting is not None:
            busy.add(starting.id)
            reserved += self._most_bytes(starting.budget_tokens)
        if dropped := self._live().shrink(busy, self._settings.session_memory_bytes - reserved):
            log.info("idle sessions moved to disk", sessions=dropped)

    def _round(self) -> None:
        """One pass for all turns that answer, then one for a turn that reads: nobody waits for more than one other."""
        reading = [item for item in self._running.items() if item[1].run is None]
        answering = [item for item in self._running.items() if item[1].run is not None]
        if answering:
            self._decode(answering)
        if reading:
            handle, running = reading[0]
            # To the end of the line.
            self._running[handle] = self._running.pop(handle)
            self._step(handle, running)

    def _decode(self, answering: list[tuple[TurnHandle, _Running]]) -> None:
        fed = [(handle, running) for handle, running in answering if not running.turn.residency.cancelled]
        logits: list[mx.array] = []
        if fed:
            try:
                most = max(1, _DRAFT_ROWS // len(fed))
                logits = run_together(
                    [running.turn.live.cache for _, running in fed],
                    [running.run[:most] for _, running in fed if running.run is not None],
                )
            except Exception as error:
                # A pass that failed may have reached some of the caches: none can be trusted.
                for handle, _ in fed:
                    self._fail(handle, error)
                fed = []
        for (handle, running), rows in zip(fed, logits, strict=True):
            self._step(handle, running, rows)
        for handle, running in answering:
            if running.turn.residency.cancelled and handle in self._running:
                self._step(handle, running)

    def _step(self, handle: TurnHandle, running: _Running, logits: mx.array | None = None) -> None:
        try:
            running.run = running.steps.send(logits)
        except StopIteration:
            self._end(handle)
        except DoesNotFit as refusal:
            turn_id = handle.request.turn_id
            handle.put(refusal, self._database.write(lambda db: writing.abandon_turn(db, turn_id)))
            self._end(handle)
        except Exception as error:
            self._fail(handle, error)

    def _evict_document(self, document_id: str, sessions: Sequence[str] | None = None) -> None:
        """Evict a deleted document's blocks from these sessions, or from all in which no turn is at work."""
        busy = [handle.request.session.id for handle in self._running]
        write = partial(writing.evict_document, document_id=document_id, sessions=sessions, busy=busy)
        # Waited for: what is read of a session from now on is as it is after this.
        for session_id in self._database.write(write).result():
            self._live().evict_document(session_id, document_id)

    def _fail(self, handle: TurnHandle, error: Exception) -> None:
        request = handle.request
        log.error("turn failed", session_id=request.session.id, turn_id=request.turn_id, exc_info=error)
        # Whatever state the cache is in, SQLite has the last committed one: the next turn rebuilds from it.
        self._live().drop(request.session.id)
        problem = as_problem(error).body()
        written = self._database.write(lambda db: writing.fail_turn(db, request.turn_id, problem))
        handle.put(Failed(problem=problem), written)
        self._end(handle)

    def _end(self, handle: TurnHandle) -> None:
        self._running.pop(handle, None)
        try:
            for document_id in self._live().documents(handle.request.session.id) & self._passages().deleted:
                # Deleted while the turn was at work.
                self._evict_document(document_id, [handle.request.session.id])
            self._shrink()
        except Exception as error:
            # The next message finds out too. Nobody else is to suffer for it.
            log.error("a session could not be tidied up", session_id=handle.request.session.id, exc_info=error)
        finally:
            handle.finish()
