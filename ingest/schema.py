"""The ingestion tables, as numbered migrations."""

from __future__ import annotations

import sqlite_utils
from sqlite_utils.migrations import Migrations

migrations = Migrations("ingest")


def m001_documents(db: sqlite_utils.Database) -> None:
    # `text` comes last: SQLite walks a long value's pages to reach the columns after it.
    # AUTOINCREMENT: a cursor must not meet a number a second time.
    db.executescript(
        """
        CREATE TABLE documents (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            name TEXT NOT NULL,
            media_type TEXT NOT NULL,
            metadata TEXT NOT NULL,
            sha256 TEXT NOT NULL,
            size INTEGER NOT NULL,
            tokens INTEGER NOT NULL DEFAULT 0,
            passages INTEGER NOT NULL DEFAULT 0,
            status TEXT NOT NULL,
            error TEXT,
            created_at TEXT NOT NULL,
            text TEXT NOT NULL
        );
        CREATE INDEX documents_name ON documents (name);

        CREATE TABLE passages (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            document_id TEXT NOT NULL REFERENCES documents (id),
            ordinal INTEGER NOT NULL,
            kind TEXT NOT NULL,
            heading TEXT NOT NULL,
            "start" INTEGER NOT NULL,
            "end" INTEGER NOT NULL,
            tokens INTEGER NOT NULL,
            part TEXT,
            text TEXT NOT NULL,
            UNIQUE (document_id, ordinal)
        );
        """
    )


def m002_full_text(db: sqlite_utils.Database) -> None:
    # External content: the index reads text back through the view, and needs the old values to forget a row.
    # So passages go before their document does, which the foreign key without CASCADE enforces.
    db.executescript(
        """
        CREATE VIEW passages_indexed AS
            SELECT passages.number AS number, passages.text AS text, passages.heading AS heading,
                documents.name AS name
            FROM passages JOIN documents ON documents.id = passages.document_id;
        CREATE VIRTUAL TABLE passages_fts USING fts5 (
            text, heading, name,
            content = 'passages_indexed', content_rowid = 'number', tokenize = 'porter unicode61'
        );
        CREATE TRIGGER passages_inserted AFTER INSERT ON passages BEGIN
            INSERT INTO passages_fts (rowid, text, heading, name)
                SELECT number, text, heading, name FROM passages_indexed WHERE number = new.number;
        END;
        CREATE TRIGGER passages_deleted BEFORE DELETE ON passages BEGIN
            INSERT INTO passages_fts (passages_fts, rowid, text, heading, name)
                SELECT 'delete', number, text, heading, name FROM passages_indexed WHERE number = old.number;
        END;
        """
    )


def m003_jobs(db: sqlite_utils.Database) -> None:
    db.executescript(
        """
        CREATE TABLE jobs (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            status TEXT NOT NULL,
            created_at TEXT NOT NULL,
            finished_at TEXT
        );
        CREATE INDEX jobs_unfinished ON jobs (number) WHERE finished_at IS NULL;

        -- No reference to documents: a job still tells what it did after they are gone.
        CREATE TABLE job_documents (
            number INTEGER PRIMARY KEY,
            job_id TEXT NOT NULL REFERENCES jobs (id),
            document_id TEXT NOT NULL,
            name TEXT NOT NULL,
            status TEXT NOT NULL,
            error TEXT
        );
        CREATE INDEX job_documents_job ON job_documents (job_id);
        CREATE INDEX job_documents_document ON job_documents (document_id);
        """
    )


def jobs_m004_versions_and_uploads(db: sqlite_utils.Database) -> None:
    # Not columns of `documents`: they would come after its text, whose pages SQLite would walk to reach them.
    db.executescript(
        """
        CREATE TABLE document_versions (
            document_id TEXT PRIMARY KEY REFERENCES documents (id) ON DELETE CASCADE,
            version INTEGER NOT NULL,
            replaces TEXT,
            charset TEXT,
            -- The size and the tokenizer that its passages are cut by.
            cut_by TEXT NOT NULL
        );
        INSERT INTO document_versions SELECT id, 1, NULL, NULL, '' FROM documents;
        CREATE INDEX documents_sha256 ON documents (sha256);

        -- Bytes that wait to be read: each in a file that has the document's id for its name.
        CREATE TABLE uploads (
            document_id TEXT PRIMARY KEY REFERENCES documents (id) ON DELETE CASCADE,
            media_type TEXT
        );

        ALTER TABLE job_documents ADD COLUMN version INTEGER NOT NULL DEFAULT 1;
        ALTER TABLE job_documents ADD COLUMN replaces TEXT;
        -- The latest change of state of the row, counted in its job from 1: where a stream of them goes on.
        ALTER TABLE job_documents ADD COLUMN change INTEGER NOT NULL DEFAULT 1;
        CREATE INDEX job_documents_change ON job_documents (job_id, change);
        CREATE INDEX job_documents_name ON job_documents (name);

        -- Deletions, and how many of them are wiped from the index and the write-ahead log as well.
        CREATE TABLE deletions (counted INTEGER NOT NULL, wiped INTEGER NOT NULL);
        INSERT INTO deletions VALUES (0, 0);
        """
    )


def m004_vectors(db: sqlite_utils.Database) -> None:
    # float16, little-endian. AUTOINCREMENT: a search that still holds a deleted vector's number must not meet
    # another passage under it, as it could under a passage's own number.
    db.executescript(
        """
        CREATE TABLE embedders (
            number INTEGER PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            dimension INTEGER NOT NULL
        );
        CREATE TABLE vectors (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            passage INTEGER NOT NULL UNIQUE REFERENCES passages (number) ON DELETE CASCADE,
            embedder INTEGER NOT NULL REFERENCES embedders (number),
            vector BLOB NOT NULL
        );
        """
    )


def docs_m001_warnings(db: sqlite_utils.Database) -> None:
    # JSON lists of what a document has that could not be read.
    db.executescript(
        """
        ALTER TABLE document_versions ADD COLUMN warnings TEXT NOT NULL DEFAULT '[]';
        ALTER TABLE job_documents ADD COLUMN warnings TEXT NOT NULL DEFAULT '[]';
        """
    )


for step in (
    m001_documents,
    m002_full_text,
    m003_jobs,
    m004_vectors,
    jobs_m004_versions_and_uploads,
    docs_m001_warnings,
):
    migrations()(step)
