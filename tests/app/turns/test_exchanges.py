"""Which old exchanges a question refers back to, on a real database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.audit import schema, writing
from app.audit.reading import Store
from app.turns.exchanges import referred, stands_alone
from ingest.database import Database
from tests.app.audit.test_store import add_session, add_turn, put

SAID = [
    ("My dog is called Bramble.", "Nice to meet Bramble."),
    ("When does the ferry to Narva leave?", "At 7:15."),
    ("When does the ferry to Lecce leave?", "At 8:15."),
    ("What does a ticket to Lecce cost?", "13 euros."),
    ("Wie heißt die Hauptstadt der Schweiz?", "Bern, nicht Zürich."),
    ("Thank you!", "You are welcome."),
]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "audit.db", schema.migrations)
    yield database
    database.close()


def tell(database: Database, session: str, said: list[tuple[str, str]]) -> None:
    store = Store(database)
    add_session(store, session)
    for number, (question, answer) in enumerate(said, start=1):
        turn = f"{session}.{number}"
        put(store, writing.begin_turn, session, f"{turn}.failed", question)
        put(store, writing.abandon_turn, f"{turn}.failed")
        add_turn(store, session, turn, question=question, answer=answer)


@pytest.mark.parametrize(
    ("question", "turns"),
    [
        ("What is my dog called?", [1]),
        ("What did I tell you earlier about my dogs?", [1]),
        ("And when does the one to Narva leave?", [2]),
        ("When does the ferry to Lecce leave, as you said before?", [3]),
        ("How much was the ticket to Lecce?", [4]),
        ("Zurich oder Bern, die Hauptstadt?", [5]),
        # Of nothing that was said; of too little that was said; of the last, which is there anyway.
        ("What is the capital of France?", []),
        ("Does the museum in Narva open on Sunday mornings in winter?", []),
        ("Thank you, welcome!", []),
        ("And when was that?", []),
        ("", []),
        ('" OR session:* NEAR(', []),
        ("\0", []),
    ],
)
def test_a_question_refers_to_what_shares_its_rare_words(database: Database, question: str, turns: list[int]) -> None:
    tell(database, "s1", SAID)
    tell(database, "s2", SAID)
    found = referred(database, "s1", question)
    assert [exchange.turn for exchange in found] == turns
    for exchange in found:
        assert [block.record.id for block in exchange.blocks] == [
            f"s1.{exchange.turn}.question",
            f"s1.{exchange.turn}.answer",
        ]
        assert exchange.tokens == sum(block.record.tokens for block in exchange.blocks)


@pytest.mark.parametrize(
    ("question", "alone"),
    [
        ("When does the ferry to Narva leave?", True),
        ("Wer baute den Turm?", True),
        ("Which treaty ended the long war that Lecce lost to Narva?", True),
        ("And when was that?", False),
        ("Who built it, and why?", False),
        ("Could you explain that in more detail?", False),
        ("Can you summarise it in two sentences?", False),
        ("Please give me the answer as a short list", False),
        ("Translate that into French please", False),
        ("Is it open on Sundays too?", False),
        ("And what about a ticket to Lecce?", False),
        ("What did you say before about the earlier question, please?", False),
        ("What can you do about it for me, and how will they do it?", False),
        ("Thanks! Thanks! Thanks!", False),
        ("请问渡轮几点开", False),
        ("", False),
    ],
)
def test_a_question_of_few_words_does_not_stand_alone(question: str, alone: bool) -> None:
    assert stands_alone(question) is alone


def test_the_newest_of_equals_comes_first_and_two_at_most(database: Database) -> None:
    tell(database, "s1", [("My dog is called Bramble.", "Nice.")] * 4 + SAID[1:])
    assert [exchange.turn for exchange in referred(database, "s1", "What is my dog called?")] == [4, 3]


def test_what_is_gone_is_not_referred_to(database: Database) -> None:
    tell(database, "s1", SAID)
    put(Store(database), lambda db: db.execute("UPDATE blocks SET state = 'dropped' WHERE id = 's1.1.answer'"))
    assert referred(database, "s1", "What is my dog called?") == []
    put(Store(database), writing.delete_session, "s1")
    assert referred(database, "s1", "When does the ferry to Narva leave?") == []
    rows = database.read(lambda db: db.execute("SELECT count(*) FROM exchanges").fetchone())
    assert rows == (0,)


def test_turns_of_an_older_database_are_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.db"
    database = Database(path, schema.migrations)
    tell(database, "s1", SAID)
    for statement in (
        "DROP TABLE exchanges",
        "DROP TABLE moves",
        *schema._BANK_TABLES.split(";")[4:],
        "INSERT INTO moves VALUES (7, 'm', 'k', 'doc_1', 3, 4, 'disk', 'dropped', 'disk_cap', 0, 'now')",
        "DELETE FROM _sqlite_migrations WHERE name = 'create_exchanges'",
    ):
        put(Store(database), lambda db, statement=statement: db.execute(statement))
    database.close()
    database = Database(path, schema.migrations)
    assert [exchange.turn for exchange in referred(database, "s1", "What is my dog called?")] == [1]
    (move,) = Store(database).moves("doc_1", None, 10).items
    assert (move.session_id, move.tokens, move.bytes, move.reason) == (None, 3, 4, "disk_cap")
    database.close()
