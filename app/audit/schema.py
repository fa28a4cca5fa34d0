"""The tables of the audit database, as migrations. Plain SQLite that others can query."""

from __future__ import annotations

import sqlite_utils
from sqlite_utils.migrations import Migrations

from app.audit import chains

migrations = Migrations("audit")

_TABLES = """
CREATE TABLE sessions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, system_prompt TEXT NOT NULL,
    budget_tokens INTEGER NOT NULL, method TEXT NOT NULL, score TEXT NOT NULL, model TEXT NOT NULL,
    created_at TEXT NOT NULL, updated_at TEXT NOT NULL
);
CREATE TABLE turns (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, number INTEGER NOT NULL,
    status TEXT NOT NULL, finish_reason TEXT, question TEXT NOT NULL, answer TEXT, sources TEXT,
    usage TEXT, timings TEXT, cache TEXT, problem TEXT, created_at TEXT NOT NULL, finished_at TEXT
);
CREATE INDEX turns_of_session ON turns (session_id, seq);
CREATE TABLE blocks (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, turn_id TEXT,
    turn INTEGER NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL, tokens INTEGER NOT NULL,
    document_id TEXT, passage_id TEXT, name TEXT, heading TEXT, score REAL NOT NULL,
    token_ids BLOB NOT NULL, created_at TEXT NOT NULL, evicted_at TEXT
);
CREATE INDEX blocks_of_session ON blocks (session_id, seq);
CREATE TABLE evictions (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, turn_id TEXT NOT NULL,
    step INTEGER NOT NULL, block_id TEXT NOT NULL, kind TEXT NOT NULL, document_id TEXT, passage_id TEXT,
    tokens INTEGER NOT NULL, score REAL NOT NULL, rank INTEGER NOT NULL, reason TEXT NOT NULL,
    resident_before INTEGER NOT NULL, resident_after INTEGER NOT NULL, bytes_freed INTEGER NOT NULL,
    outcome TEXT NOT NULL, created_at TEXT NOT NULL
);
CREATE INDEX evictions_of_session ON evictions (session_id, seq);
CREATE TABLE compression (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL, turn_id TEXT NOT NULL, step INTEGER NOT NULL,
    phase TEXT NOT NULL, seen_tokens INTEGER NOT NULL, resident_tokens INTEGER NOT NULL,
    compression_ratio REAL NOT NULL, budget_tokens INTEGER NOT NULL, kv_bytes INTEGER NOT NULL,
    blocks INTEGER NOT NULL, created_at TEXT NOT NULL
);
CREATE INDEX compression_of_session ON compression (session_id, seq);
"""


_BANK_TABLES = """
ALTER TABLE blocks ADD COLUMN bank_key TEXT;
CREATE INDEX blocks_in_bank ON blocks (bank_key) WHERE bank_key IS NOT NULL;
CREATE TABLE recalls (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, turn_id TEXT NOT NULL,
    block_id TEXT NOT NULL, kind TEXT NOT NULL, document_id TEXT, passage_id TEXT, tokens INTEGER NOT NULL,
    origin TEXT NOT NULL, recomputed INTEGER NOT NULL, seconds REAL NOT NULL,
    resident_before INTEGER NOT NULL, resident_after INTEGER NOT NULL, created_at TEXT NOT NULL
);
CREATE INDEX recalls_of_session ON recalls (session_id, seq);
CREATE TABLE moves (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, bank_key TEXT NOT NULL, document_id TEXT NOT NULL,
    tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, source TEXT NOT NULL, target TEXT NOT NULL, reason TEXT NOT NULL,
    blocks_dropped INTEGER NOT NULL, created_at TEXT NOT NULL
)
"""


# Also without the turns' own text: `moves` of sessions and system prompts, which are of no document.
_EXCHANGES_TABLES = """
CREATE VIRTUAL TABLE exchanges USING fts5(session, question, answer, tokenize = 'porter unicode61 remove_diacritics 2');
INSERT INTO exchanges (rowid, session, question, answer)
    SELECT seq, session_id, question, answer FROM turns WHERE status = 'done';
ALTER TABLE moves RENAME TO old_moves;
CREATE TABLE moves (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, bank_key TEXT NOT NULL, document_id TEXT,
    session_id TEXT, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, source TEXT NOT NULL, target TEXT NOT NULL,
    reason TEXT NOT NULL, blocks_dropped INTEGER NOT NULL, created_at TEXT NOT NULL
);
INSERT INTO moves SELECT seq, id, bank_key, document_id, NULL, tokens, bytes, source, target, reason, blocks_dropped,
    created_at FROM old_moves;
DROP TABLE old_moves
"""


@migrations()
def create_tables(db: sqlite_utils.Database) -> None:
    # One by one: executescript would commit the migration's transaction first.
    for statement in _TABLES.split(";"):
        db.execute(statement)


@migrations()
def create_bank_tables(db: sqlite_utils.Database) -> None:
    for statement in _BANK_TABLES.split(";"):
        db.execute(statement)


@migrations()
def create_exchanges(db: sqlite_utils.Database) -> None:
    for statement in _EXCHANGES_TABLES.split(";"):
        db.execute(statement)


@migrations()
def create_forks(db: sqlite_utils.Database) -> None:
    db.execute("ALTER TABLE sessions ADD COLUMN forked_from TEXT")


@migrations()
def create_moments(db: sqlite_utils.Database) -> None:
    # What the model saw when a turn ended, as a JSON list of block ids; among how many a block was the one to leave.
    db.execute("ALTER TABLE turns ADD COLUMN resident TEXT")
    db.execute("ALTER TABLE evictions ADD COLUMN candidates INTEGER")
    db.execute("CREATE INDEX evictions_of_block ON evictions (block_id)")
    db.execute("CREATE INDEX recalls_of_block ON recalls (block_id)")


@migrations()
def create_chains(db: sqlite_utils.Database) -> None:
    db.execute("ALTER TABLE turns ADD COLUMN chain TEXT")
    db.execute("CREATE INDEX turns_of_chain ON turns (chain) WHERE chain IS NOT NULL")
    for session in list(db.query("SELECT id, system_prompt FROM sessions")):
        chain = chains.first(session["system_prompt"])
        turns = "SELECT id, question, answer FROM turns WHERE session_id = ? AND status = 'done' ORDER BY seq"
        for turn in list(db.query(turns, [session["id"]])):
            chain = chains.following(chain, turn["question"], turn["answer"])
            db.execute("UPDATE turns SET chain = ? WHERE id = ?", [chain, turn["id"]])
