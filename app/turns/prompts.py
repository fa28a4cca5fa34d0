"""What the model reads beside what people write: the system prompt of most sessions, and passages as messages."""

from __future__ import annotations

from collections.abc import Iterator

from ingest.errors import NotFound
from ingest.library import MAX_LIMIT, Library
from ingest.records import StoredPassage
from kv.model.template import ChatTemplate

DEFAULT_SYSTEM_PROMPT = (
    "You are a helpful assistant. Answer the question from the passages you are given, in one or two sentences."
)


def default_system(template: ChatTemplate) -> list[int]:
    """The system prompt of sessions that name none, as a message."""
    return template.wrap(template.system, DEFAULT_SYSTEM_PROMPT)


def passages_as_read(library: Library, template: ChatTemplate, document_id: str) -> Iterator[list[int]]:
    """A document's passages as messages, in tokens; what is left of them ends when it is deleted."""
    cursor = None
    while True:
        try:
            page = library.passages(document_id, cursor, MAX_LIMIT)
        except NotFound:
            return
        for passage in page.items:
            yield template.wrap(template.passage, passage_message(passage))
        if (cursor := page.next_cursor) is None:
            return


def passage_message(passage: StoredPassage) -> str:
    """A passage as the model reads it: where it is from, and its text."""
    place = f"{passage.name} > {passage.heading}" if passage.heading else passage.name
    return f"[{place}]\n{passage.text.strip()}"
