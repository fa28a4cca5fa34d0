"""Where the command line puts documents: a running server, or the data folder itself when there is none."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO, Protocol

import click
import msgspec

from app.cli.client import Client, ServerError, Unreachable
from app.cli.walk import SourceFile
from app.folder import lock_folder
from app.library import open_documents, open_library
from app.settings import Settings
from ingest.database import CannotOpen
from ingest.embedder import EmbedderError
from ingest.errors import InvalidInput
from ingest.records import Document, Job, StoredPassage

# Files up to so many bytes together are read first and sent in one request.
TOGETHER = 500_000

_LOADING_SECONDS = 30.0


class AnyLibrary(Protocol):
    """What can be done with documents."""

    def send(self, files: Sequence[SourceFile]) -> tuple[str | None, list[tuple[str, str]]]:
        """Send files of one folder: the job, if any file was taken in, and (name, reason) for those that were not
        and are not in it either.
        """

    def job(self, job_id: str) -> Job:
        """A job as it is now."""

    def cancel(self, job_id: str) -> Job:
        """Cancel a job."""

    def search(self, query: str, top_k: int) -> list[StoredPassage]:
        """The passages that match best."""

    def documents(self) -> Iterator[Document]:
        """Every document."""

    def delete(self, document_id: str) -> None:
        """Delete a document."""

    def close(self) -> None:
        """Let go of it."""


def metadata_of(file: SourceFile) -> dict[str, Any]:
    """A folder's documents say which it was, so that they can be told from others of their names."""
    return {} if file.folder is None else {"folder": str(file.folder.resolve())}


class ServerLibrary:
    """A running server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def send(self, files: Sequence[SourceFile]) -> tuple[str | None, list[tuple[str, str]]]:
        """See AnyLibrary."""
        with ExitStack() as stack:
            opened, failed = _open(files, stack)
            if not opened:
                return None, failed
            try:
                answer = self._client.upload(opened, metadata_of(files[0]))
            except Unreachable:
                raise
            except ServerError as error:
                refused = error.problem.get("files")
                if not refused and len(opened) > 1:
                    raise
                reasons = [(r["name"], r["error"]) for r in refused or ()] or [(opened[0][0], str(error))]
                return None, failed + reasons
        return answer["job_id"], failed

    def job(self, job_id: str) -> Job:
        """See AnyLibrary."""
        return msgspec.convert(self._client.call("GET", f"/v1/jobs/{job_id}"), Job)

    def cancel(self, job_id: str) -> Job:
        """See AnyLibrary."""
        return msgspec.convert(self._client.call("POST", f"/v1/jobs/{job_id}/cancel"), Job)

    def search(self, query: str, top_k: int) -> list[StoredPassage]:
        """See AnyLibrary."""
        found = self._client.call("POST", "/v1/search", json={"query": query, "top_k": top_k})
        return msgspec.convert(found["items"], list[StoredPassage])

    def documents(self) -> Iterator[Document]:
        """See AnyLibrary."""
        for item in self._client.items("/v1/documents"):
            yield msgspec.convert(item, Document)

    def delete(self, document_id: str) -> None:
        """See AnyLibrary."""
        self._client.call("DELETE", f"/v1/documents/{document_id}")

    def close(self) -> None:
        """See AnyLibrary."""
        self._client.close()


class FolderLibrary:
    """The data folder, which is this process's own as long as it is open.

    count_tokens: None to look only. Raises InUse if another process has the folder, click.ClickException if it cannot
    be used.
    """

    def __init__(self, settings: Settings, count_tokens: Callable[[], Callable[[str], int]] | None) -> None:
        self._max_bytes = settings.max_upload_bytes
        with ExitStack() as stack:
            try:
                settings.folder.mkdir(parents=True, exist_ok=True)
                lock = lock_folder(settings.folder)
                stack.callback(lock.release)
                database = open_documents(settings)
            except (CannotOpen, OSError) as error:
                raise click.ClickException(str(error)) from error
            stack.callback(database.close)
            try:
                self._library = open_library(
                    database, count_tokens() if count_tokens else len, settings, at_work=count_tokens is not None
                )
            except EmbedderError as error:
                raise click.ClickException(f"KEEPWHOLE_EMBEDDER: {error}") from error
            stack.callback(self._library.close)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """See AnyLibrary."""
        self._stack.close()

    def send(self, files: Sequence[SourceFile]) -> tuple[str | None, list[tuple[str, str]]]:
        """See AnyLibrary."""
        with ExitStack() as stack:
            opened, failed = _open(files, stack)
            uploads, refused = [], []
            for name, file in opened:
                try:
                    uploads.append(
                        self._library.receive(name, file, None, metadata_of(files[0]), max_bytes=self._max_bytes)
                    )
                except InvalidInput as error:
                    refused.append((name, str(error)))
        if not uploads:
            return None, failed + refused
        return self._library.submit(uploads, refused).id, failed

    def job(self, job_id: str) -> Job:
        """See AnyLibrary."""
        return self._library.job(job_id)

    def cancel(self, job_id: str) -> Job:
        """See AnyLibrary."""
        return self._library.cancel(job_id)

    def search(self, query: str, top_k: int) -> list[StoredPassage]:
        """See AnyLibrary."""
        # Vectors are read from disk first; without them words alone would be searched.
        deadline = time.monotonic() + _LOADING_SECONDS
        while (vectors := self._library.vectors) and not vectors.ready and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            return self._library.search(query, top_k)
        except InvalidInput as error:
            raise click.ClickException(str(error)) from error

    def documents(self) -> Iterator[Document]:
        """See AnyLibrary."""
        cursor = None
        while True:
            page = self._library.documents(cursor, 200)
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return

    def delete(self, document_id: str) -> None:
        """See AnyLibrary."""
        self._library.delete(document_id)


def _open(files: Sequence[SourceFile], stack: ExitStack) -> tuple[list[tuple[str, BinaryIO]], list[tuple[str, str]]]:
    """Small files as bytes, since a file that changes while it is sent breaks the request; large ones as they are."""
    opened: list[tuple[str, BinaryIO]] = []
    failed: list[tuple[str, str]] = []
    for source in files:
        try:
            file = stack.enter_context(source.path.open("rb"))
            small = source.path.stat().st_size <= TOGETHER
            opened.append((source.name, io.BytesIO(file.read()) if small else file))
        except OSError as error:
            failed.append((source.name, error.strerror or str(error)))
    return opened, failed
