"""Submissions: uploads recorded as documents of a job, as new versions of their names, or as unchanged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlite_utils

from ingest.documents import Upload, printable_name
from ingest.jobs import add_job_document, new_id, now, remove_document, searched_document
from ingest.records import Job, JobDocument
from ingest.uploads import StoredUpload

_MAX_REASON = 500


def submit(
    db: sqlite_utils.Database,
    uploads: Sequence[Upload | StoredUpload],
    failed: Sequence[tuple[str, str]],
    cut_by: str,
) -> Job:
    """Record documents and the job that will ingest them. `failed`: (name, reason). Inside a write.

    `cut_by`: the size and tokenizer that passages are cut by now. A document that is unchanged is not recorded again.
    """
    created_at = now()
    documents = [_known(db, upload, cut_by) or _record(db, upload, None, created_at, cut_by) for upload in uploads] + [
        _record(db, _refused(name), _encodable(reason), created_at, cut_by) for name, reason in failed
    ]
    states = {document.status for document in documents}
    open = "queued" in states
    job = Job(
        id=new_id("job"),
        status="queued" if open else "done" if "unchanged" in states else "failed",
        documents=documents,
        created_at=created_at,
        finished_at=None if open else created_at,
    )
    db.execute(
        "INSERT INTO jobs (id, status, created_at, finished_at) VALUES (?, ?, ?, ?)",
        [job.id, job.status, job.created_at, job.finished_at],
    )
    for document in documents:
        add_job_document(db, job.id, document)
    return job


def _known(db: sqlite_utils.Database, upload: Upload | StoredUpload, cut_by: str) -> JobDocument | None:
    """The newest document of this name, if the upload is the same: done already, or queued by another job.

    What failed is tried again.
    """
    row = db.execute(
        "SELECT id, status, sha256, media_type, metadata, version, replaces, charset, cut_by, warnings FROM documents"
        " JOIN document_versions ON document_id = id"
        " WHERE name = ? AND status NOT IN ('failed', 'cancelled') ORDER BY number DESC LIMIT 1",
        [upload.name],
    ).fetchone()
    if row is None:
        return None
    id, status, sha256, media_type, metadata, version, replaces, charset, known_cut_by, warnings = row
    # Metadata as text, since Python's True is 1.
    known = (sha256, media_type, charset, known_cut_by, _canonical(json.loads(metadata)))
    if known != (upload.sha256, upload.media_type, upload.charset, cut_by, _canonical(upload.metadata)):
        return None
    if status == "done":
        return JobDocument(
            id=id, name=upload.name, status="unchanged", error=None, version=version, warnings=json.loads(warnings)
        )
    return JobDocument(id=id, name=upload.name, status="queued", error=None, version=version, replaces=replaces)


def _canonical(metadata: dict[str, Any]) -> str:
    return json.dumps(metadata, sort_keys=True)


def _record(
    db: sqlite_utils.Database, upload: Upload | StoredUpload, error: str | None, created_at: str, cut_by: str
) -> JobDocument:
    id = upload.id if isinstance(upload, StoredUpload) else new_id("doc")
    status = "queued" if error is None else "failed"
    (version,) = db.execute(
        "SELECT COALESCE(MAX(version), 0) + 1 FROM documents JOIN document_versions ON document_id = id WHERE name = ?",
        [upload.name],
    ).fetchone()
    # What failed or was cancelled under this name is over: only the last attempt is worth a record.
    over = db.execute("SELECT id FROM documents WHERE name = ? AND status IN ('failed', 'cancelled')", [upload.name])
    for (document_id,) in over.fetchall():
        remove_document(db, document_id)
    db.execute(
        "INSERT INTO documents"
        " (id, name, media_type, metadata, sha256, size, status, error, created_at, text)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            id,
            upload.name,
            upload.media_type,
            json.dumps(upload.metadata, ensure_ascii=False),
            upload.sha256,
            upload.size,
            status,
            error,
            created_at,
            upload.text if isinstance(upload, Upload) else "",
        ],
    )
    replaces = searched_document(db, id) if error is None else None
    warnings = upload.warnings if isinstance(upload, Upload) else []
    db.execute(
        "INSERT INTO document_versions (document_id, version, replaces, charset, cut_by, warnings)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        [id, version, replaces, upload.charset, cut_by, json.dumps(warnings, ensure_ascii=False)],
    )
    if isinstance(upload, StoredUpload):
        db.execute("INSERT INTO uploads (document_id, media_type) VALUES (?, ?)", [id, upload.declared])
    return JobDocument(
        id=id,
        name=upload.name,
        status="queued" if error is None else "failed",
        error=error,
        version=version,
        replaces=replaces,
    )


def _refused(name: str) -> Upload:
    return Upload(name=printable_name(name), text="", media_type="", metadata={}, size=0, sha256="")


def _encodable(reason: str) -> str:
    return reason[:_MAX_REASON].encode(errors="replace").decode()
