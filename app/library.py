"""The library as the settings want it, for the server and for a command line without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.settings import Settings
from ingest.counting import TokenizerCounter
from ingest.database import Database
from ingest.embedders import load_embedder
from ingest.library import Library
from ingest.library import migrations as ingest_migrations

if TYPE_CHECKING:
    from kv.model.loading import LoadedModel


def counter_of(model: LoadedModel) -> TokenizerCounter:
    """Counts the tokens of text as the model would read it."""
    return TokenizerCounter(model.codec.plain, model.codec.control_ids)


def open_documents(settings: Settings) -> Database:
    """The database of documents. Raises ingest.database.CannotOpen."""
    return Database(settings.folder / "library.db", ingest_migrations)


def open_library(
    database: Database,
    count_tokens: Callable[[str], int],
    settings: Settings,
    *,
    busy: Callable[[], bool] = lambda: False,
    on_stored: Callable[[str, list[str]], None] = lambda *_: None,
    at_work: bool = True,
) -> Library:
    """The library, which goes on with unfinished jobs at once, unless it is only looked at.

    Raises ingest.embedder.EmbedderError.
    """
    return Library(
        database,
        count_tokens,
        settings.passage_tokens,
        load_embedder(settings.embedder),
        tokenizer=settings.model,
        seconds=settings.ingest_seconds,
        busy=busy,
        on_stored=on_stored,
        at_work=at_work,
    )
