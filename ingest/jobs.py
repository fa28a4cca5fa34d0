"""Jobs in the database: recording submissions, the states that their documents go through, cancelling, removing."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlite_utils

from ingest.passages import Passage
from ingest.records import Job, JobChanges, JobDocument

_JOB_DOCUMENT = "document_id, name, status, error, version, replaces, warnings"
_OPEN = "('queued', 'running')"
# The job's next change; for an UPDATE of job_documents, or an INSERT into it, that knows `job_id`.
_NEXT_CHANGE = "(SELECT COALESCE(MAX(change), 0) + 1 FROM job_documents AS other WHERE other.job_id = {job_id})"
_DELETED = "(deleted)"
_CANCELLED = "the job was cancelled"


class Task(NamedTuple):
    """A document whose turn it is: the row of its job, and its id."""

    number: int
    document_id: str


class Twin(NamedTuple):
    """What a document of the same bytes was read and cut into."""

    text: str
    media_type: str
    passages: list[Passage]
    warnings: list[str]


class Stored(NamedTuple):
    """What `store` did: ids of the passages that came, and id and number of each document whose place they took."""

    passage_ids: list[str]
    replaced: list[tuple[str, int]]


class Work(NamedTuple):
    """What there is to do for a task.

    `text` is None while the bytes wait in the uploads' folder; `declared` is then the media type as its sender gave it.
    `warnings`: of a text that is read already.
    """

    name: str
    text: str | None
    media_type: str
    declared: str | None
    twin: Twin | None
    warnings: list[str]


def now() -> str:
    """This moment in UTC as ISO 8601 with milliseconds and Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_id(prefix: str) -> str:
    """`prefix` and 16 random hexadecimal characters."""
    return f"{prefix}_{secrets.token_hex(8)}"


def read_jobs(db: sqlite_utils.Database, clause: str, bound: list[Any]) -> list[tuple[int, Job]]:
    """Jobs that `clause` picks, each with its number."""
    rows = db.execute(f"SELECT number, id, status, created_at, finished_at FROM jobs {clause}", bound).fetchall()
    documents: dict[str, list[JobDocument]] = {row[1]: [] for row in rows}
    for job_id, *fields in db.execute(
        f"SELECT job_id, {_JOB_DOCUMENT} FROM job_documents"
        " WHERE job_id IN (SELECT value FROM json_each(?)) ORDER BY number",
        [json.dumps(list(documents))],
    ):
        documents[job_id].append(_job_document(fields))
    return [
        (number, Job(id=id, status=status, documents=documents[id], created_at=created, finished_at=finished))
        for number, id, status, created, finished in rows
    ]


def read_changes(db: sqlite_utils.Database, job_id: str, after: int) -> JobChanges | None:
    """What changed in a job after its change number `after`; None if there is no such job."""
    job = db.execute("SELECT status, finished_at FROM jobs WHERE id = ?", [job_id]).fetchone()
    if job is None:
        return None
    rows = db.execute(
        f"SELECT change, {_JOB_DOCUMENT} FROM job_documents WHERE job_id = ? AND change > ? ORDER BY change",
        [job_id, after],
    ).fetchall()
    counts = db.execute("SELECT status, COUNT(*) FROM job_documents WHERE job_id = ? GROUP BY status", [job_id])
    (last,) = db.execute("SELECT COALESCE(MAX(change), 0) FROM job_documents WHERE job_id = ?", [job_id]).fetchone()
    return JobChanges(
        documents=[(change, _job_document(fields)) for change, *fields in rows],
        status=job[0],
        finished_at=job[1],
        counts=dict(counts.fetchall()),
        last=last,
    )


def next_job(db: sqlite_utils.Database) -> str | None:
    """The oldest job that is not finished."""
    row = db.execute("SELECT id FROM jobs WHERE finished_at IS NULL ORDER BY number LIMIT 1").fetchone()
    return None if row is None else row[0]


def start_next(db: sqlite_utils.Database, job_id: str) -> Task | None:
    """Mark the job's next document as running; None if there is none left. Inside a write."""
    # `running` is what a process that stopped half way left behind.
    for number, document_id, status, error in db.execute(
        "SELECT job_documents.number, document_id, documents.status, documents.error FROM job_documents"
        f" JOIN documents ON documents.id = document_id WHERE job_id = ? AND job_documents.status IN {_OPEN}"
        " ORDER BY job_documents.number",
        [job_id],
    ).fetchall():
        task = Task(number, document_id)
        if status in ("queued", "running"):
            db.execute("UPDATE jobs SET status = 'running' WHERE id = ?", [job_id])
            settle(db, task, "running", None)
            return task
        # An earlier job had the same document, and is done with it.
        _settle_row(db, task, "unchanged" if status == "done" else status, error)
    return None


def read_work(db: sqlite_utils.Database, task: Task, cut_by: str) -> Work | None:
    """What to do for `task`; None if it was cancelled or its document deleted. `cut_by`: size and tokenizer now."""
    row = db.execute(
        "SELECT name, text, documents.media_type, uploads.document_id, uploads.media_type, warnings FROM documents"
        " JOIN document_versions AS version ON version.document_id = id"
        " LEFT JOIN uploads ON uploads.document_id = id WHERE id = ?",
        [task.document_id],
    ).fetchone()
    if row is None or not _is_open(db, task):
        return None
    name, text, media_type, waits, declared, warnings = row
    twin = _twin(db, task.document_id, cut_by)
    return Work(name, None if waits else text, media_type, declared, twin, json.loads(warnings))


def _twin(db: sqlite_utils.Database, document_id: str, cut_by: str) -> Twin | None:
    row = db.execute(
        """
        SELECT twin.id, twin.text, twin.media_type, known.warnings FROM documents
        JOIN document_versions AS version ON version.document_id = documents.id
        JOIN documents AS twin ON twin.sha256 = documents.sha256 AND twin.media_type = documents.media_type
        JOIN document_versions AS known ON known.document_id = twin.id
        WHERE documents.id = ? AND twin.id != documents.id AND twin.status = 'done'
            AND known.charset IS version.charset AND known.cut_by = ?
        LIMIT 1
        """,
        [document_id, cut_by],
    ).fetchone()
    if row is None:
        return None
    columns = [f'"{name}"' for name in Passage.__struct_fields__]
    passages = db.execute(
        f"SELECT {', '.join(columns)} FROM passages WHERE document_id = ? ORDER BY ordinal", [row[0]]
    ).fetchall()
    fields = Passage.__struct_fields__
    cut = [Passage(**dict(zip(fields, values, strict=True))) for values in passages]
    return Twin(row[1], row[2], cut, json.loads(row[3]))


def store(
    db: sqlite_utils.Database,
    task: Task,
    text: str,
    media_type: str,
    passages: Sequence[Passage],
    cut_by: str,
    warnings: Sequence[str],
) -> Stored:
    """Make a document searchable in the place of those of its name. Inside a write.

    Does nothing if the task was cancelled or the document deleted meanwhile.
    """
    if not _is_open(db, task):
        return Stored([], [])
    replaced = [
        (row[0], row[1])
        for row in db.execute(
            "SELECT older.id, older.number FROM documents JOIN documents AS older"
            " ON older.name = documents.name AND older.number < documents.number WHERE documents.id = ?",
            [task.document_id],
        ).fetchall()
    ]
    _note_replaced(db, task)
    # Not as it was submitted: another process may have had other settings.
    left_out = json.dumps(warnings, ensure_ascii=False)
    db.execute(
        "UPDATE document_versions SET cut_by = ?, warnings = ? WHERE document_id = ?",
        [cut_by, left_out, task.document_id],
    )
    db.execute("UPDATE job_documents SET warnings = ? WHERE number = ?", [left_out, task.number])
    for document_id, _ in replaced:
        remove_document(db, document_id)
    ids = [new_id("pas") for _ in passages]
    db.execute("DELETE FROM uploads WHERE document_id = ?", [task.document_id])
    db.conn.executemany(
        'INSERT INTO passages (id, document_id, ordinal, kind, heading, "start", "end", tokens, part, text)'
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            (id, task.document_id, n, p.kind, p.heading, p.start, p.end, p.tokens, p.part, p.text)
            for n, (id, p) in enumerate(zip(ids, passages, strict=True))
        ),
    )
    db.execute(
        "UPDATE documents SET text = ?, media_type = ?, tokens = ?, passages = ? WHERE id = ?",
        [text, media_type, sum(passage.tokens for passage in passages), len(passages), task.document_id],
    )
    settle(db, task, "done", None)
    return Stored(ids, replaced)


def _note_replaced(db: sqlite_utils.Database, task: Task) -> None:
    """What was foreseen at submission may be gone by now, or have come."""
    searched = searched_document(db, task.document_id)
    db.execute("UPDATE document_versions SET replaces = ? WHERE document_id = ?", [searched, task.document_id])
    db.execute("UPDATE job_documents SET replaces = ? WHERE number = ?", [searched, task.number])


def searched_document(db: sqlite_utils.Database, document_id: str) -> str | None:
    """The older document of the same name that is searched now."""
    row = db.execute(
        "SELECT older.id FROM documents JOIN documents AS older"
        " ON older.name = documents.name AND older.number < documents.number AND older.status = 'done'"
        " WHERE documents.id = ? ORDER BY older.number DESC LIMIT 1",
        [document_id],
    ).fetchone()
    return None if row is None else row[0]


def settle(db: sqlite_utils.Database, task: Task, status: str, error: str | None) -> None:
    """Record the state of a task, unless it was cancelled meanwhile. Inside a write."""
    if not _is_open(db, task):
        return
    db.execute("UPDATE documents SET status = ?, error = ? WHERE id = ?", [status, error, task.document_id])
    _settle_row(db, task, status, error)
    if status not in ("queued", "running"):
        db.execute("DELETE FROM uploads WHERE document_id = ?", [task.document_id])


def _settle_row(db: sqlite_utils.Database, task: Task, status: str, error: str | None) -> None:
    db.execute(
        f"UPDATE job_documents SET status = ?, error = ?, change = {_NEXT_CHANGE.format(job_id='job_documents.job_id')}"
        " WHERE number = ?",
        [status, error, task.number],
    )


def still_waits(db: sqlite_utils.Database, document_id: str) -> bool:
    """Whether the document's bytes are still to be read."""
    return db.execute("SELECT 1 FROM uploads WHERE document_id = ?", [document_id]).fetchone() is not None


def _is_open(db: sqlite_utils.Database, task: Task) -> bool:
    sql = f"SELECT 1 FROM job_documents WHERE number = ? AND status IN {_OPEN}"
    return db.execute(sql, [task.number]).fetchone() is not None


def finish(db: sqlite_utils.Database, job_id: str) -> None:
    """Close a job that has nothing left to do. Inside a write."""
    db.execute(
        """
        UPDATE jobs SET finished_at = ?, status = (
            SELECT CASE
                WHEN SUM(status IN ('done', 'unchanged')) > 0 THEN 'done'
                WHEN SUM(status = 'failed') > 0 THEN 'failed'
                ELSE 'cancelled'
            END
            FROM job_documents WHERE job_id = jobs.id
        )
        WHERE id = ? AND finished_at IS NULL
        """,
        [now(), job_id],
    )


def cancel(db: sqlite_utils.Database, job_id: str) -> list[str]:
    """Cancel a job; a finished one stays as it is. Returns the ids of documents that will not come. Inside a write."""
    changed = db.execute(
        "UPDATE jobs SET status = 'cancelled', finished_at = ? WHERE id = ? AND finished_at IS NULL", [now(), job_id]
    )
    if changed.rowcount == 0:
        return []
    tasks = [
        Task(*row)
        for row in db.execute(
            f"SELECT number, document_id FROM job_documents WHERE job_id = ? AND status IN {_OPEN} ORDER BY number",
            [job_id],
        ).fetchall()
    ]
    dropped: list[str] = []
    for task in tasks:
        if _is_wanted_elsewhere(db, task):
            _settle_row(db, task, "cancelled", _CANCELLED)
            db.execute("UPDATE documents SET status = 'queued' WHERE id = ?", [task.document_id])
        else:
            settle(db, task, "cancelled", _CANCELLED)
            db.execute("UPDATE documents SET text = '' WHERE id = ?", [task.document_id])
            dropped.append(task.document_id)
    _count_deletion(db)
    return dropped


def _is_wanted_elsewhere(db: sqlite_utils.Database, task: Task) -> bool:
    sql = f"SELECT 1 FROM job_documents WHERE document_id = ? AND number != ? AND status IN {_OPEN}"
    return db.execute(sql, [task.document_id, task.number]).fetchone() is not None


def remove_document(db: sqlite_utils.Database, document_id: str) -> int | None:
    """Delete a document with its passages, index rows and vectors. Inside a write.

    Returns its number, None if there is no such document.
    """
    db.execute(
        "UPDATE job_documents SET status = 'cancelled', error = 'deleted before it was ingested',"
        f" change = {_NEXT_CHANGE.format(job_id='job_documents.job_id')}"
        f" WHERE document_id = ? AND status IN {_OPEN}",
        [document_id],
    )
    db.execute("DELETE FROM passages WHERE document_id = ?", [document_id])
    row = db.execute("SELECT number FROM documents WHERE id = ?", [document_id]).fetchone()
    db.execute("DELETE FROM documents WHERE id = ?", [document_id])
    _count_deletion(db)
    return None if row is None else row[0]


def delete_document(db: sqlite_utils.Database, document_id: str) -> int | None:
    """`remove_document` for good: jobs forget the name, of its earlier versions too. Inside a write."""
    row = db.execute("SELECT name FROM documents WHERE id = ?", [document_id]).fetchone()
    if row is None:
        return None
    number = remove_document(db, document_id)
    db.execute(
        "UPDATE job_documents SET name = ?, error = CASE status WHEN 'failed' THEN ? ELSE error END"
        " WHERE name = ? AND document_id NOT IN (SELECT id FROM documents)",
        [_DELETED, _DELETED, row[0]],
    )
    return number


def _count_deletion(db: sqlite_utils.Database) -> None:
    db.execute("UPDATE deletions SET counted = counted + 1")


def deletions_to_wipe(db: sqlite_utils.Database) -> int | None:
    """How many deletions there were, if some are not wiped."""
    row = db.execute("SELECT counted FROM deletions WHERE counted > wiped").fetchone()
    return None if row is None else row[0]


def merge_index(db: sqlite_utils.Database) -> None:
    """Rewrite the text index without what was deleted from it: FTS5 only marks that. Inside a write."""
    db.execute("INSERT INTO passages_fts (passages_fts) VALUES ('optimize')")


def note_wiped(db: sqlite_utils.Database, counted: int) -> None:
    """Record that the first `counted` deletions are wiped. Inside a write."""
    db.execute("UPDATE deletions SET wiped = ?", [counted])


def add_job_document(db: sqlite_utils.Database, job_id: str, document: JobDocument) -> None:
    """Add a document to a job. Inside a write."""
    db.execute(
        f"INSERT INTO job_documents (job_id, {_JOB_DOCUMENT}, change) VALUES (?, ?, ?, ?, ?, ?, ?, ?,"
        f" {_NEXT_CHANGE.format(job_id='?')})",
        [
            job_id,
            document.id,
            document.name,
            document.status,
            document.error,
            document.version,
            document.replaces,
            json.dumps(document.warnings, ensure_ascii=False),
            job_id,
        ],
    )


def _job_document(fields: Sequence[Any]) -> JobDocument:
    named = dict(zip(JobDocument.__struct_fields__, fields, strict=True))
    return JobDocument(**{**named, "warnings": json.loads(named["warnings"])})
