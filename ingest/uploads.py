"""Uploads on disk: bytes stream into a folder, where they wait until the worker reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Set
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ingest.documents import Upload, check_metadata, check_name, named_charset, read_upload
from ingest.errors import InvalidInput, TooLarge
from ingest.jobs import new_id
from ingest.media_types import DOCX, PDF, media_type_of
from ingest.readers.docx import check_docx_start
from ingest.readers.pdf import check_pdf_start

# Text of at most so many bytes is read at once, so that its sender hears what is wrong with it.
READ_AT_ONCE = 256_000

_BLOCK = 1 << 18
# Where formats are told by; enough to see that a ZIP archive without a name's ending is a Word document.
_HEAD = 1 << 20


class StoredUpload(msgspec.Struct, frozen=True, kw_only=True):
    """A document accepted for ingestion whose bytes wait on disk. `id` will be the document's.

    `declared`: the media type as its sender gave it, from which, with name and bytes, `media_type` was told.
    `charset` as in Upload.
    """

    id: str
    name: str
    declared: str | None
    media_type: str
    metadata: dict[str, Any]
    size: int
    sha256: str
    charset: str | None


class UploadFolder:
    """The folder where uploads wait, a file for each, named by its document's id and never by what a sender says.

    It is there only while something waits in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, document_id: str) -> Path:
        """Where a document's bytes are."""
        return self._folder / document_id

    def take(
        self,
        name: str,
        source: BinaryIO,
        media_type: str | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        max_bytes: int,
    ) -> Upload | StoredUpload:
        """Check an upload and take it in, block by block.

        A small text is read, and comes back as it would from `ingest.documents.read_upload`, which says what is
        raised. Everything else is checked by name, metadata, size and first bytes, and goes to disk.
        """
        check_name(name)
        checked = check_metadata(metadata)
        head = source.read(_HEAD)
        essence, charset = media_type_of(name, media_type, head)
        if not head:
            raise InvalidInput(name, "0 bytes", "a document must not be blank")
        if essence == PDF:
            check_pdf_start(name, head)
        elif essence == DOCX:
            check_docx_start(name, head)
        elif len(head) <= READ_AT_ONCE:
            return read_upload(name, head, media_type, checked, max_bytes=max_bytes)
        id = new_id("doc")
        try:
            size, sha256 = self._write(id, name, head, source, max_bytes)
        except BaseException:
            self.remove(id)
            raise
        return StoredUpload(
            id=id,
            name=name,
            declared=media_type,
            media_type=essence,
            metadata=checked,
            size=size,
            sha256=sha256,
            charset=named_charset(charset),
        )

    def remove(self, document_id: str) -> None:
        """Remove a document's file, and the folder with the last one."""
        self.path(document_id).unlink(missing_ok=True)
        self._remove_if_empty()

    def keep_only(self, document_ids: Set[str]) -> None:
        """Remove what waits for none of these documents: an earlier process was cut off."""
        if self._folder.is_dir():
            for path in list(self._folder.iterdir()):
                if path.name not in document_ids:
                    path.unlink()
            self._remove_if_empty()

    def _write(self, id: str, name: str, head: bytes, source: BinaryIO, max_bytes: int) -> tuple[int, str]:
        digest = hashlib.sha256()
        size = 0
        with self._create(id) as file:
            block = head
            while block:
                size += len(block)
                if size > max_bytes:
                    raise TooLarge(name, size + _rest(source), max_bytes)
                digest.update(block)
                file.write(block)
                block = source.read(_BLOCK)
        return size, digest.hexdigest()

    def _create(self, id: str) -> BinaryIO:
        # Another thread may remove the folder, empty as it is, between the two.
        while True:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            try:
                return self.path(id).open("xb")
            except FileNotFoundError:
                if not self._folder.parent.is_dir():
                    raise

    def _remove_if_empty(self) -> None:
        try:
            self._folder.rmdir()
        except OSError:
            # Others wait in it, or it is not there.
            return


def _rest(source: BinaryIO) -> int:
    """Bytes of `source` that were not read."""
    here = source.tell()
    return source.seek(0, 2) - here
