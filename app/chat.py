"""Chat sessions on the event loop: creating them, asking them, deleting them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import sqlite_utils

from app.audit import writing
from app.audit.importing import Told, import_exchanges
from app.audit.reading import Store
from app.audit.records import BlockStory, SessionRecord, StoredBlock
from app.engine import Engine, Figures
from app.errors import Conflict, Invalid, Unavailable
from app.memory.live import new_block
from app.settings import Settings
from app.turns.events import Event
from app.turns.exchanges import Exchange, referred, stands_alone
from app.turns.feed import Place, TurnFeed, as_stream, replay
from app.turns.handle import TurnHandle
from app.turns.prompts import DEFAULT_SYSTEM_PROMPT, passage_message
from app.turns.request import Candidate, Question, TurnRequest
from ingest.database import Database
from ingest.errors import NotFound
from ingest.jobs import new_id, now
from ingest.library import Library
from kv.model.loading import LoadedModel
from kv.model.sampling import Sampling

_DEFAULT_MAX_TOKENS = 256
_RETRY_SECONDS = 5
_BEGIN_SECONDS = 0.01
# What a history that is told may take of the budget is one part in so many.
_TOLD_SHARE = 2
# Streams of turns that are over, to be heard again as they were.
_FEEDS_KEPT = 64


@dataclass(frozen=True)
class NewSession:
    """A session that is wanted. system_prompt, budget_tokens: None takes the default."""

    title: str
    system_prompt: str | None
    budget_tokens: int | None
    method: str
    score: str


class ChatService:
    """Everything that HTTP asks of chat sessions. Methods run on the event loop and never block it."""

    def __init__(
        self, settings: Settings, model: LoadedModel, engine: Engine, database: Database, library: Library
    ) -> None:
        self._settings = settings
        self._model = model
        self._engine = engine
        self._database = database
        self._library = library
        self._active: dict[str, TurnHandle | None] = {}
        # The last turn of each session, the latest last; those that are over are let go at some time.
        self._feeds: dict[str, TurnFeed] = {}
        self.store = Store(database)
        self.closing = False

    @property
    def active_turns(self) -> int:
        """Turns accepted and not yet over."""
        return len(self._active)

    @property
    def alive(self) -> bool:
        """Whether the MLX thread is there to answer."""
        return self._engine.alive

    @property
    def figures(self) -> Figures:
        """What the MLX thread has to do, and the K/V in memory."""
        return self._engine.figures

    async def create(self, wanted: NewSession, told: Sequence[tuple[str, str]] = ()) -> SessionRecord:
        """Create a session. Raises Invalid if its budget cannot hold a question and an answer.

        told: questions and answers that it is to go on from, as if they had been had here; the newest of them are read.
        """
        budget = self._settings.budget_tokens if wanted.budget_tokens is None else wanted.budget_tokens
        if budget > self._model.context_length:
            raise Invalid("budget_tokens", f"{budget} is more than the model's {self._model.context_length} positions")
        prompt = DEFAULT_SYSTEM_PROMPT if wanted.system_prompt is None else wanted.system_prompt
        self._refuse_hopeless("system_prompt", prompt, budget)
        template = self._model.template
        token_ids = await asyncio.to_thread(template.wrap, template.system, prompt)
        system = new_block(new_id("blk"), "system", token_ids)
        least = system.record.tokens + template.user.tokens + template.assistant.tokens + 2
        if budget < least:
            raise Invalid(
                "budget_tokens",
                f"{budget} is less than {least}, which the system prompt of {system.record.tokens} tokens, "
                "a one-token question and a one-token answer take",
            )
        session = SessionRecord(
            id=new_id("ses"),
            title=wanted.title,
            system_prompt=prompt,
            budget_tokens=budget,
            method=wanted.method,
            score=wanted.score,
            model=self._model.name,
            created_at=system.record.created_at,
            updated_at=system.record.created_at,
        )
        exchanges = await asyncio.to_thread(self._as_told, told, (budget - system.record.tokens) // _TOLD_SHARE)

        def insert(db: sqlite_utils.Database) -> None:
            writing.insert_session(db, session, system)
            import_exchanges(db, session.id, exchanges)

        await asyncio.wrap_future(self._database.write(insert))
        return await asyncio.to_thread(self.store.session, session.id)

    def _as_told(self, exchanges: Sequence[tuple[str, str]], room: int) -> list[Told]:
        """Exchanges as they are recorded. room: tokens that the newest of them may take in the cache."""
        template, told = self._model.template, list[Told]()
        for question, answer in reversed(exchanges):
            turn_id, blocks = new_id("trn"), list[StoredBlock]()
            # What cannot fit is not even encoded.
            if self._model.codec.least(question + answer) <= room:
                for kind, wrapper, text in (
                    ("question", template.user, question),
                    ("answer", template.assistant, answer),
                ):
                    blocks.append(new_block(f"{turn_id}.{kind}", kind, template.wrap(wrapper, text)))
            tokens = sum(block.record.tokens for block in blocks)
            if not blocks or tokens > room:
                # Nothing older either: an exchange without those after it would mislead.
                blocks, room = [], -1
            room -= tokens
            told.append(Told(turn_id, question, answer, tokens, blocks))
        return told[::-1]

    def story(self, session_id: str, block_id: str) -> BlockStory:
        """A block, its text, and all that happened to it. Raises NotFound. Not for the event loop."""
        block = self.store.block(session_id, block_id)
        template = self._model.template
        wrappers = {"system": template.system, "question": template.user, "answer": template.assistant}
        text = template.unwrap(wrappers.get(block.record.kind, template.passage), block.token_ids)
        return BlockStory(block=block.record, text=text, history=self.store.episodes(block.record))

    async def rename(self, session_id: str, title: str) -> SessionRecord:
        """Give a session another title. Raises NotFound."""
        await asyncio.to_thread(self.store.session, session_id)
        await asyncio.wrap_future(self._database.write(lambda db: writing.rename_session(db, session_id, title)))
        return await asyncio.to_thread(self.store.session, session_id)

    async def fork(
        self,
        session_id: str,
        title: str | None = None,
        before: int | None = None,
        told: Sequence[tuple[str, str]] = (),
    ) -> SessionRecord:
        """Create a session that begins as a copy of one. title: None keeps the other's.

        before: number of the first turn that is not taken over, nor what came with it or later; None takes all.
        told: questions and answers that follow, as in `create`.
        Raises NotFound, or Conflict while that one answers.
        """
        self._claim(session_id)
        try:
            parent = await asyncio.to_thread(self.store.session, session_id)
            created_at = now()
            child = msgspec.structs.replace(
                parent,
                id=new_id("ses"),
                title=parent.title if title is None else title,
                forked_from=parent.id,
                created_at=created_at,
                updated_at=created_at,
            )
            exchanges = await asyncio.to_thread(self._as_told, told, parent.budget_tokens // _TOLD_SHARE)

            def copy(db: sqlite_utils.Database) -> dict[str, str]:
                names = writing.fork_session(db, child, before)
                import_exchanges(db, child.id, exchanges)
                return names

            try:
                names = await asyncio.wrap_future(self._database.write(copy))
                await asyncio.wrap_future(self._engine.fork(parent, child, names))
            except BaseException:
                # Also when the client is gone, who will never learn its id.
                self._engine.forget(child.id)
                self._database.write(lambda db: writing.delete_session(db, child.id))
                raise
        finally:
            self._release(session_id)
        return await asyncio.to_thread(self.store.session, child.id)

    async def delete(self, session_id: str) -> None:
        """Cancel what the session is doing and delete it. Raises NotFound."""
        await asyncio.to_thread(self.store.session, session_id)
        while handle := await self._at_work(session_id):
            handle.cancel()
            await handle.wait()
        # Nothing else may begin until it is gone.
        self._active[session_id] = None
        try:
            await asyncio.to_thread(self.store.session, session_id)
            await asyncio.wrap_future(self._engine.forget(session_id))
            await asyncio.wrap_future(self._database.write(lambda db: writing.delete_session(db, session_id)))
            self._feeds.pop(session_id, None)
        finally:
            self._release(session_id)

    async def forget_document(self, document_id: str) -> None:
        """Drop the K/V of a document that has been deleted, in the bank and in sessions.

        Sessions that are answering evict its blocks when they are done.
        """
        await asyncio.wrap_future(self._engine.forget_document(document_id))
        # What that wrote to the log is committed when this is, since writes go in turn.
        await asyncio.wrap_future(self._database.write(lambda _: None))

    async def cancel(self, session_id: str) -> bool:
        """Stop the session's turn and wait until it has. Returns whether there was one. Raises NotFound."""
        await asyncio.to_thread(self.store.session, session_id)
        handle = await self._at_work(session_id)
        if handle is None:
            return False
        handle.cancel()
        await handle.wait()
        return True

    async def _at_work(self, session_id: str) -> TurnHandle | None:
        """The session's turn, waited for if it has been claimed and not begun."""
        while session_id in self._active and self._active[session_id] is None:
            await asyncio.sleep(_BEGIN_SECONDS)
        return self._active.get(session_id)

    def cancel_all(self) -> None:
        """Stop every turn and refuse new ones, so that the server can end. Safe from a signal handler."""
        self.closing = True
        for handle in list(self._active.values()):
            if handle is not None:
                handle.cancel()

    async def ask(self, session_id: str, question: Question, behind: str | None = None) -> TurnFeed:
        """Start a turn, which runs to its end whether or not anybody follows it.

        behind: the turn that must be the session's last one; Conflict if it has gone on since.

        Raises NotFound, Conflict while the session answers something else, Unavailable when too many turns are at work,
        Invalid if the session was made for another model or the question cannot fit its budget.
        """
        accepted_at = time.monotonic()
        self._claim(session_id)
        turn_id = new_id("trn")
        try:
            session = await asyncio.to_thread(self.store.session, session_id)
            if session.model != self._model.name:
                raise Invalid("session", f"made for model {session.model}; this server runs {self._model.name}")
            last = await asyncio.to_thread(self.store.last_done, session_id) if behind else None
            if last != behind:
                raise Conflict(f"session {session_id} has gone on since turn {behind}")
            self._refuse_hopeless("content", question.content, session.budget_tokens)
            sampling = self._sampling(question)
            question_ids, candidates, deleted, exchanges = await asyncio.to_thread(self._retrieve, session_id, question)
            retrieved_at = time.monotonic()
            number = await asyncio.wrap_future(
                self._database.write(lambda db: writing.begin_turn(db, session_id, turn_id, question.content))
            )
            request = TurnRequest(
                session=session,
                turn_id=turn_id,
                number=number,
                asked=question,
                sampling=sampling,
                question_ids=question_ids,
                candidates=candidates,
                deleted_documents=deleted,
                default_max_tokens=_DEFAULT_MAX_TOKENS,
                accepted_at=accepted_at,
                retrieval_seconds=retrieved_at - accepted_at,
                referred=tuple(exchanges),
                stands_alone=stands_alone(question.content),
            )
            handle = TurnHandle(request, on_finish=lambda: self._release(session_id))
            self._active[session_id] = handle
        except BaseException:
            self._active.pop(session_id, None)
            self._database.write(lambda db: writing.abandon_turn(db, turn_id))
            raise
        self._engine.submit(handle)
        feed = TurnFeed(handle)
        self._feeds.pop(session_id, None)
        self._feeds[session_id] = feed
        for other in [id for id, kept in self._feeds.items() if kept.over][:-_FEEDS_KEPT]:
            del self._feeds[other]
        return feed

    async def events(self, session_id: str, place: Place | None) -> AsyncIterator[tuple[Place, Event]] | None:
        """The events of a turn, each with the place behind it: as they were sent, or by what SQLite has of the turn.

        place: where to go on; None: from the start of the turn that runs, or of the last one. None if nothing is left
        to be said. Raises NotFound.
        """
        feed = self._feeds.get(session_id)
        if feed is not None and (place is None or place.turn_id == feed.turn_id):
            after = 0 if place is None else place.number
            return None if feed.over and after >= feed.sent else feed.follow(after)
        if place is None:
            turn = await asyncio.to_thread(self.store.last_turn, session_id)
        else:
            turn = await asyncio.to_thread(self.store.turn, session_id, place.turn_id)
        if turn is None or turn.status == "running":
            return None
        place = place or Place(turn.id)
        if place.finished:
            return None
        return as_stream(replay(turn, await asyncio.to_thread(self.store.changes_of, turn.id), place))

    def _sampling(self, question: Question) -> Sampling:
        sampling = self._model.sampling.but(question.sampling)
        words = self._model.vocabulary
        for token in sampling.logit_bias:
            if token >= words:
                raise Invalid("logit_bias", f"{token} is not a token id; the model has {words}")
        return sampling

    def _refuse_hopeless(self, field: str, text: str, budget: int) -> None:
        """Megabytes of text would hold the event loop up while they are encoded, to be refused all the same."""
        if (least := self._model.codec.least(text)) > budget:
            raise Invalid(
                field, f"{len(text)} characters are more than {least} tokens; the session's budget is {budget} tokens"
            )

    def _claim(self, session_id: str) -> None:
        if session_id in self._active:
            raise Conflict(f"session {session_id} is answering another message; wait for it or cancel it")
        if self.closing or len(self._active) >= self._settings.max_turns:
            why = "stopping" if self.closing else f"busy with {len(self._active)} turns, its limit"
            raise Unavailable(f"the server is {why}", retry_after=_RETRY_SECONDS)
        self._active[session_id] = None

    def _release(self, session_id: str) -> None:
        self._active.pop(session_id, None)

    def _retrieve(
        self, session_id: str, question: Question
    ) -> tuple[list[int], list[Candidate], frozenset[str], list[Exchange]]:
        template = self._model.template
        question_ids = template.wrap(template.user, question.content)
        found = self._library.search(question.content, question.top_k, question.filter) if question.top_k else []
        candidates = [
            Candidate(passage, template.wrap(template.passage, passage_message(passage))) for passage in found
        ]
        deleted = frozenset(filter(self._is_gone, self.store.resident_documents(session_id)))
        return question_ids, candidates, deleted, referred(self._database, session_id, question.content)

    def _is_gone(self, document_id: str) -> bool:
        try:
            self._library.document(document_id)
        except NotFound:
            return True
        return False
