"""What the routes work with, and how it comes up: databases, the MLX thread, then the library and the chat service."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

import structlog

from app.audit import schema, writing
from app.audit.reading import Store
from app.chat import ChatService
from app.conversations import Conversations
from app.engine import Engine
from app.errors import Unavailable
from app.folder import FolderLock
from app.library import counter_of, open_documents, open_library
from app.settings import Settings
from app.turns.prompts import passages_as_read
from ingest.database import Database
from ingest.embedders import check_embedder
from ingest.library import Library
from kv.model.loading import LoadedModel, load_model

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Services:
    """The parts, once the model is loaded."""

    settings: Settings
    model: LoadedModel
    chat: ChatService
    conversations: Conversations
    library: Library
    store: Store


class Boot:
    """Brings the service up in the background, so that probes answer while the model loads, and takes it down.

    lock: the data folder's, which is released at the end. Raises ingest.database.CannotOpen if a database cannot be
    opened, EmbedderError if the embedder is not there.
    """

    def __init__(self, settings: Settings, lock: FolderLock) -> None:
        self.settings = settings
        self._lock = lock
        check_embedder(settings.embedder)
        self._audit = Database(settings.folder / "audit.db", schema.migrations)
        self._documents = open_documents(settings)
        self._engine: Engine | None = None
        self._services: Services | None = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def services(self) -> Services:
        """The services. Raises Unavailable while they come up, or if they could not."""
        if self._services is None:
            if self._error is not None:
                raise Unavailable(f"the model could not be loaded: {self._error}")
            raise Unavailable(f"model {self.settings.model} is loading", retry_after=2)
        return self._services

    def announce(self, url: str) -> None:
        """Write down where the service is, for command lines that look for it."""
        self._lock.announce(url)

    def start(self) -> None:
        """Begin to come up, on the running event loop."""
        self._task = asyncio.create_task(self._come_up())

    async def wait(self) -> None:
        """Return when up. Raises what went wrong."""
        if self._task is not None:
            await asyncio.shield(self._task)
        if self._error is not None:
            raise self._error

    def cancel_turns(self) -> None:
        """Stop every turn and refuse new ones. Safe from a signal handler."""
        if self._services is not None:
            self._services.chat.cancel_all()

    async def stop(self) -> None:
        """Take everything down; queued writes are finished first."""
        self.cancel_turns()
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        if self._services is not None:
            await asyncio.to_thread(self._services.library.close)
        for database in (self._audit, self._documents):
            await asyncio.to_thread(database.close)
        self._lock.release()

    async def _come_up(self) -> None:
        settings = self.settings
        started = time.monotonic()
        log.info("loading model", model=settings.model)
        try:
            self._services = await self._build(settings)
        except Exception as error:
            log.error("model could not be loaded", model=settings.model, exc_info=error)
            self._error = error
        else:
            log.info("model loaded", model=settings.model, seconds=round(time.monotonic() - started, 1))

    async def _build(self, settings: Settings) -> Services:
        if lost := await asyncio.wrap_future(self._audit.write(writing.recover)):
            log.warning("turns were cut off by the last stop and rolled back", turns=lost)
        engine = self._engine = Engine(
            lambda: load_model(settings.model, quantize=settings.quantize), self._audit, settings
        )
        model = await asyncio.wrap_future(engine.loaded)

        def stored(document_id: str, replaced: list[str]) -> None:
            for old in replaced:
                # As a deletion does.
                engine.forget_document(old)
            if settings.bank_ahead:
                engine.note_ingested(document_id)

        count = counter_of(model)
        library = await asyncio.to_thread(
            open_library,
            self._documents,
            count,
            settings,
            busy=lambda: engine.figures.turns_at_work > 0,
            on_stored=stored,
        )
        if (vectors := library.vectors) is not None:
            log.info("searching by vectors too", embedder=vectors.embedder)
        store = Store(self._audit)
        known_documents = await asyncio.to_thread(library.document_ids)
        known = known_documents | await asyncio.to_thread(store.session_ids)
        await asyncio.wrap_future(engine.keep_owners(known))
        for document_id in await asyncio.to_thread(store.documents) - known:
            # Deleted by a process that could not finish, or by a command without a server.
            await asyncio.wrap_future(engine.forget_document(document_id))
        if settings.bank_ahead:
            engine.read_ahead(partial(passages_as_read, library, model.template))
            for document_id in sorted(known_documents):
                # What the bank lacks of them since an earlier process stopped.
                engine.note_ingested(document_id)
        chat = ChatService(settings, model, engine, self._audit, library)
        return Services(
            settings=settings,
            model=model,
            chat=chat,
            conversations=Conversations(chat, model.name, settings.budget_tokens),
            library=library,
            store=chat.store,
        )
