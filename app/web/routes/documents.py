"""Documents and search."""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any, BinaryIO, cast

import msgspec
from litestar import Controller, Request, delete, get, post
from litestar.datastructures import UploadFile
from litestar.di import NamedDependency
from litestar.exceptions import ClientException
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from litestar.params import FromPath, FromQuery, JSONBody

from app.problems import Problem, as_problem, invalid
from app.services import Services
from app.web.bodies import DocumentBody, SearchBody
from app.web.responses import not_json, wrong_body
from ingest.database import Page
from ingest.documents import Upload
from ingest.embedding import VectorsState
from ingest.errors import InvalidInput
from ingest.records import Document, StoredPassage
from ingest.uploads import StoredUpload

# All that Litestar says of too many parts.
_TOO_MANY = "Request Entity Too Large"
_ONE_EACH = "one request takes one file of a name; send it by itself, as the next version, or under another name"
# Of one request. Each is in memory, or in a file of its own, until the request is answered.
MAX_FILES = 5000


class _UploadOperation(Operation):
    """The two forms of an upload, which the handler takes apart itself."""

    def __post_init__(self) -> None:
        file = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        text = Schema(type=OpenAPIType.STRING)
        files = Schema(
            type=OpenAPIType.OBJECT,
            required=["files"],
            properties={"files": Schema(type=OpenAPIType.ARRAY, items=file), "metadata": text},
        )
        properties = {"name": text, "text": text, "media_type": text, "metadata": Schema(type=OpenAPIType.OBJECT)}
        document = Schema(type=OpenAPIType.OBJECT, required=["name", "text"], properties=dict(properties))
        self.request_body = RequestBody(
            required=True,
            content={
                "multipart/form-data": OpenAPIMediaType(schema=files),
                "application/json": OpenAPIMediaType(schema=document),
            },
        )


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found, best first. vectors: None with KEEPWHOLE_EMBEDDER=none."""

    items: list[StoredPassage]
    vectors: VectorsState | None


class DocumentController(Controller):
    """Documents and what can be found in them."""

    path = "/v1"
    tags = ("documents",)

    @post("/documents", status_code=HTTPStatus.ACCEPTED, operation_class=_UploadOperation)
    async def upload(self, request: Request[Any, Any, Any], services: NamedDependency[Services]) -> dict[str, Any]:
        """Take documents in: multipart `files` (with an optional `metadata` JSON object), or one document as JSON.

        They are ingested in the background; follow the job. In a multipart upload of several files, at most 5,000,
        those that cannot be read, and a second file of one name, are listed as failed and the rest go on; if none can
        be read, nothing is recorded. A name that is there already gets a new version, which takes the place of the old
        one once it is done, or is `unchanged` if bytes, media type and metadata are the same.
        """
        content_type, _ = request.content_type
        if content_type == "multipart/form-data":
            uploads, failed = await self._from_multipart(request, services)
        elif content_type == "application/json":
            uploads, failed = [await self._from_json(request, services)], []
        else:
            raise Problem(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Type: {content_type or 'none'!r} is neither multipart/form-data nor application/json",
            )
        job = await asyncio.to_thread(services.library.submit, uploads, failed)
        return {"job_id": job.id, "documents": job.documents}

    @staticmethod
    async def _from_json(request: Request[Any, Any, Any], services: Services) -> Upload | StoredUpload:
        try:
            body = msgspec.json.decode(await request.body(), type=DocumentBody)
        except msgspec.ValidationError as error:
            raise wrong_body(str(error)) from error
        except msgspec.DecodeError as error:
            raise not_json(error) from error
        limit = services.settings.max_upload_bytes
        receive = services.library.receive_text
        try:
            return await asyncio.to_thread(
                receive, body.name, body.text, body.media_type, body.metadata, max_bytes=limit
            )
        except InvalidInput as error:
            raise _in_field("text", body.name, error) from error

    @staticmethod
    async def _from_multipart(
        request: Request[Any, Any, Any], services: Services
    ) -> tuple[list[Upload | StoredUpload], list[tuple[str, str]]]:
        try:
            # Litestar writes files over a megabyte to disk as they come, and counts the whole body against its limit.
            form = await request.form()
        except (ClientException, ValueError) as error:
            if isinstance(error, ClientException) and error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                raise
            reason = error.detail if isinstance(error, ClientException) else error
            if reason == _TOO_MANY:
                limits = f"the limits are {MAX_FILES} files, and 4096 bytes of headers for each"
                raise Problem(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"files: too many, or their headers; {limits}", field="files"
                ) from error
            raise Problem(
                HTTPStatus.BAD_REQUEST, f"body: not a form that can be read: {reason}", field="body"
            ) from error
        parts = form.getall("files", [])
        try:
            metadata = _metadata(form.get("metadata"))
            for name in form:
                if name not in ("files", "metadata"):
                    raise invalid(name, "no such field; the form takes files and metadata")
            files = [part for part in parts if isinstance(part, UploadFile)]
            if not files:
                raise invalid("files", "no file in the form; it takes one or more")
            return await _receive(files, metadata, services)
        finally:
            for part in form.values():
                if isinstance(part, UploadFile):
                    await part.close()

    @get("/documents")
    async def documents(
        self, services: NamedDependency[Services], cursor: FromQuery[str | None] = None, limit: FromQuery[int] = 50
    ) -> Page[Document]:
        """Documents, newest first."""
        return await asyncio.to_thread(services.library.documents, cursor, limit)

    @get("/documents/{document_id:str}")
    async def document(self, services: NamedDependency[Services], document_id: FromPath[str]) -> Document:
        """One document."""
        return await asyncio.to_thread(services.library.document, document_id)

    @delete("/documents/{document_id:str}")
    async def remove(self, services: NamedDependency[Services], document_id: FromPath[str]) -> None:
        """Delete a document, its passages, and its blocks in every session; one that is answering lets go when done."""
        await asyncio.to_thread(services.library.delete, document_id)
        await services.chat.forget_document(document_id)

    @get("/documents/{document_id:str}/passages")
    async def passages(
        self,
        services: NamedDependency[Services],
        document_id: FromPath[str],
        cursor: FromQuery[str | None] = None,
        limit: FromQuery[int] = 50,
    ) -> Page[StoredPassage]:
        """A document's passages in reading order; their texts join to the document's."""
        return await asyncio.to_thread(services.library.passages, document_id, cursor, limit)

    @post("/search", status_code=HTTPStatus.OK)
    async def search(self, services: NamedDependency[Services], data: JSONBody[SearchBody]) -> Found:
        """The passages that match a query best, by words and by meaning. Any text is a valid query.

        ranks say why each was found; score is fused from them. vectors says how far search by meaning is.
        """
        where = data.filter.to_filter() if data.filter else None
        vectors = services.library.vectors
        items = await asyncio.to_thread(services.library.search, data.query, data.top_k, where)
        return Found(items=items, vectors=vectors)


async def _receive(
    files: list[UploadFile], metadata: dict[str, Any] | None, services: Services
) -> tuple[list[Upload | StoredUpload], list[tuple[str, str]]]:
    """What of `files` can be taken in, and (name, reason) for the rest. Raises the first one's problem if none can."""
    library, limit = services.library, services.settings.max_upload_bytes
    uploads: list[Upload | StoredUpload] = []
    refused: list[tuple[str, InvalidInput]] = []
    names: set[str] = set()
    try:
        for file in files:
            if file.filename in names:
                refused.append((file.filename, InvalidInput(file.filename, "a second file of this name", _ONE_EACH)))
                continue
            names.add(file.filename)
            take = partial(
                library.receive, file.filename, cast(BinaryIO, file.file), file.content_type, metadata, max_bytes=limit
            )
            try:
                uploads.append(await asyncio.to_thread(take))
            except InvalidInput as error:
                refused.append((file.filename, error))
    except BaseException:
        library.discard(uploads)
        raise
    failed = [(name, str(error)) for name, error in refused]
    if not uploads:
        problem = _in_field("files", *refused[0])
        problem.fields["files"] = [{"name": name, "error": reason} for name, reason in failed]
        raise problem
    return uploads, failed


def _in_field(field: str, name: str, error: InvalidInput) -> Problem:
    """The problem of a file called `name` that came in `field`; ingestion names the file, a client its field."""
    problem = as_problem(error)
    if error.field == name or (field == "files" and not error.field.startswith("metadata")):
        problem.fields["field"] = field
    return problem


def _metadata(part: object) -> dict[str, Any] | None:
    if part is None:
        return None
    try:
        value = msgspec.json.decode(part) if isinstance(part, str) else part
    except msgspec.DecodeError as error:
        raise invalid("metadata", f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid("metadata", f"a {type(value).__name__}, not a JSON object")
    return value
