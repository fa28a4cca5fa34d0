from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlite_utils
from hypothesis import given
from hypothesis import strategies as st

from app.audit import schema, writing
from app.audit.reading import EvictionFilter, Store
from app.audit.records import BlockRecord, CompressionPoint, Eviction, SessionRecord, StoredBlock, pack, unpack
from app.turns.events import CacheFigures, Source, Timings, Usage
from ingest.database import Database, Page, decode_cursor, encode_cursor
from ingest.errors import InvalidInput, NotFound

TIME = "2026-01-31T12:00:00.000Z"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "audit.db", schema.migrations)
    yield database
    database.close()


@pytest.fixture
def store(database: Database) -> Store:
    return Store(database)


def put(store: Store, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return store.database.write(lambda db: work(db, *args, **named)).result()


def query(store: Store, sql: str, *bound: object) -> list[tuple[Any, ...]]:
    """What others see in the file."""
    connection = sqlite3.connect(store.database.path)
    try:
        return connection.execute(sql, bound).fetchall()
    finally:
        connection.close()


def session_record(id: str, **changes: Any) -> SessionRecord:
    record = SessionRecord(
        id=id,
        title=f"title of {id}",
        system_prompt="Be brief.",
        budget_tokens=512,
        method="chunkkv",
        score="attn_mass",
        model="smol",
        created_at=TIME,
        updated_at=TIME,
    )
    return msgspec.structs.replace(record, **changes)


def block(id: str, kind: str = "prose", turn: int = 1, **changes: Any) -> StoredBlock:
    values = {
        "id": id,
        "turn_id": f"t{turn}" if turn else None,
        "turn": turn,
        "kind": kind,
        "state": "resident",
        "tokens": 3,
        "document_id": None,
        "passage_id": None,
        "name": None,
        "heading": None,
        "score": 0.0,
        "created_at": TIME,
        "evicted_at": None,
    } | changes
    return StoredBlock(record=BlockRecord(**values), token_ids=[1, 70_000, len(id)])


def point(turn_id: str = "t1", step: int = 0, **changes: Any) -> CompressionPoint:
    values = {
        "turn_id": turn_id,
        "step": step,
        "phase": "eviction",
        "seen_tokens": 30,
        "resident_tokens": 20,
        "compression_ratio": 1.5,
        "budget_tokens": 512,
        "kv_bytes": 4096,
        "blocks": 2,
        "created_at": TIME,
    } | changes
    return CompressionPoint(**values)


def eviction(n: int, **changes: Any) -> Eviction:
    values = {
        "id": f"e{n}",
        "session_id": "s1",
        "turn_id": "t1",
        "step": 0,
        "block_id": f"b{n}",
        "kind": "prose",
        "document_id": "d1",
        "passage_id": f"p{n}",
        "tokens": 3,
        "score": 0.25,
        "rank": n,
        "reason": "room_for_turn",
        "resident_before": 23,
        "resident_after": 20,
        "bytes_freed": 512,
        "outcome": "dropped",
        "created_at": TIME,
    } | changes
    return Eviction(**values)


def add_session(store: Store, id: str = "s1", **changes: Any) -> SessionRecord:
    record = session_record(id, **changes)
    put(store, writing.insert_session, record, block(f"{id}.system", "system", 0))
    return record


def add_eviction(store: Store, n: int, **changes: Any) -> Eviction:
    row = eviction(n, **changes)
    put(store, writing.insert_eviction, row, point(row.turn_id, n))
    return row


SOURCE = Source(
    passage_id="p1",
    document_id="d1",
    name="a.md",
    heading="A",
    kind="prose",
    text="Grün 👍",
    score=1.25,
    tokens=9,
    state="streamed",
)
USAGE = Usage(prompt_tokens=9, cached_tokens=4, prefilled_tokens=5, completion_tokens=2)
TIMINGS = Timings(retrieval=0.1, queued=0.2, prefill=0.3, first_token=None, decode=0.4, total=1.0)
CACHE = CacheFigures(
    budget_tokens=512,
    resident_tokens=20,
    peak_tokens=21,
    seen_tokens=30,
    compression_ratio=1.5,
    kv_bytes=4096,
    blocks=2,
    evicted=1,
)


def add_turn(store: Store, session_id: str, turn_id: str, **changes: Any) -> int:
    number: int = put(store, writing.begin_turn, session_id, turn_id, changes.pop("question", f"question of {turn_id}"))
    columns = {
        "status": "done",
        "finish_reason": "stop",
        "answer": f"answer of {turn_id}",
        "sources": [SOURCE],
        "usage": USAGE,
        "timings": TIMINGS,
        "cache": CACHE,
    } | changes
    blocks = [block(f"{turn_id}.question", "question", number), block(f"{turn_id}.answer", "answer", number)]
    end = point(turn_id, 7, phase="turn_end")
    put(store, writing.end_turn, session_id, turn_id, blocks, {f"{session_id}.system": 2.5}, end, **columns)
    return number


Lister = Callable[[str | None, int], Page[Any]]


def walk(page: Lister, limit: int, between: Callable[[], object] = lambda: None, items_of_one: int = 1) -> list[Any]:
    items: list[Any] = []
    cursor = None
    while True:
        got = page(cursor, limit)
        assert len(got.items) == limit * items_of_one or got.next_cursor is None
        items += got.items
        if got.next_cursor is None:
            return items
        assert got.next_cursor != cursor
        cursor = got.next_cursor
        between()


def test_a_session_comes_back_with_figures_from_its_blocks_and_turns(store):
    record = add_session(store)
    assert store.session("s1") == msgspec.structs.replace(record, resident_tokens=3, seen_tokens=3)
    add_turn(store, "s1", "t1")
    put(store, writing.insert_blocks, "s1", [block("b1", tokens=10), block("b2", tokens=100)])
    add_eviction(store, 2)
    put(store, writing.begin_turn, "s1", "t2", "running")
    got = store.session("s1")
    assert (got.turns, got.resident_tokens, got.seen_tokens) == (1, 3 + 6 + 10, 3 + 6 + 110)
    assert got.updated_at > got.created_at == TIME


def test_figures_are_of_one_session_only(store):
    add_session(store, "s1")
    before = store.session("s1")
    add_session(store, "s2")
    add_turn(store, "s2", "t1")
    put(store, writing.insert_blocks, "s2", [block("x", passage_id="p", document_id="d")])
    assert store.session("s1") == before
    assert store.blocks("s1", None, 10).items == [block("s1.system", "system", 0).record]
    assert store.messages("s1", None, 10).items == []
    assert store.compression("s1", None, 10).items == []
    assert (store.resident_documents("s1"), store.resident_documents("s2")) == ([], ["d"])


def test_a_session_takes_any_text(store):
    record = add_session(store, title="'; DROP TABLE sessions; --", system_prompt='é\n"👩‍👩‍👧‍👦"\0end')
    assert (store.session("s1").title, store.session("s1").system_prompt) == (record.title, record.system_prompt)


def test_turns_are_numbered_from_one_in_each_session(store):
    add_session(store, "s1")
    add_session(store, "s2")
    numbers = [put(store, writing.begin_turn, *ids, "?") for ids in (("s1", "a"), ("s2", "b"), ("s1", "c"))]
    assert numbers == [1, 1, 2]
    put(store, writing.fail_turn, "c", {"detail": "no"})
    assert put(store, writing.begin_turn, "s1", "d", "?") == 3
    put(store, writing.abandon_turn, "d")
    assert put(store, writing.begin_turn, "s1", "e", "?") == 3
    put(store, writing.abandon_turn, "a")
    assert put(store, writing.begin_turn, "s1", "f", "?") == 4
    assert query(store, "SELECT id FROM turns ORDER BY seq") == [("b",), ("c",), ("e",), ("f",)]


def test_a_failed_turn_keeps_its_problem_and_is_no_message(store):
    add_session(store)
    for turn_id in ("a", "b"):
        put(store, writing.begin_turn, "s1", turn_id, "?")
    put(store, writing.fail_turn, "a", {"detail": "Grün", "status": 500})
    rows = query(store, "SELECT id, status, problem ->> 'detail', finished_at IS NULL FROM turns ORDER BY seq")
    assert rows == [("a", "failed", "Grün", 0), ("b", "running", None, 1)]
    assert store.messages("s1", None, 10).items == []
    assert store.session("s1").turns == 0


def test_an_ended_turn_is_two_messages_two_blocks_scores_and_a_point(store):
    add_session(store)
    assert add_turn(store, "s1", "t1") == 1
    put(store, lambda db: db.execute("UPDATE turns SET created_at = ?", [TIME]).rowcount)
    question, answer = store.messages("s1", None, 10).items
    assert (question.turn_id, question.role, question.content) == ("t1", "user", "question of t1")
    assert (question.finish_reason, question.sources) == (None, None)
    assert (answer.turn_id, answer.role, answer.content) == ("t1", "assistant", "answer of t1")
    assert (answer.finish_reason, answer.sources) == ("stop", [msgspec.to_builtins(SOURCE)])
    assert TIME == question.created_at < answer.created_at
    assert [(b.id, b.kind, b.score) for b in store.blocks("s1", None, 10).items] == [
        ("s1.system", "system", 2.5),
        ("t1.question", "question", 0.0),
        ("t1.answer", "answer", 0.0),
    ]
    assert store.compression("s1", None, 10).items == [point("t1", 7, phase="turn_end")]
    row = query(store, "SELECT status, usage, timings, cache, problem FROM turns")[0]
    assert [row[0], *map(msgspec.json.decode, row[1:4]), row[4]] == [
        "done",
        *map(msgspec.to_builtins, (USAGE, TIMINGS, CACHE)),
        None,
    ]


def test_a_cancelled_turn_without_an_answer_is_no_message(store):
    add_session(store)
    put(store, writing.begin_turn, "s1", "t1", "?")
    end = partial(writing.end_turn, status="cancelled", finish_reason="cancelled", answer=None, sources=[])
    put(store, end, "s1", "t1", [], {}, point())
    assert store.messages("s1", None, 10).items == []
    assert query(store, "SELECT status, answer, sources, finished_at > created_at OR 1 FROM turns") == [
        ("cancelled", None, "[]", 1)
    ]


def test_what_fails_half_way_leaves_nothing_behind(store):
    add_session(store)
    put(store, writing.begin_turn, "s1", "t1", "?")

    def fail(db: sqlite_utils.Database) -> None:
        writing.insert_session(db, session_record("s2"), block("s2.system", "system", 0))
        writing.insert_blocks(db, "s1", [block(f"b{n}") for n in range(300)])
        writing.insert_eviction(db, eviction(1), point())
        writing.end_turn(db, "s1", "t1", [block("b")], {}, point(), status="done")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        store.database.write(fail).result()
    for table, rows in (("sessions", 1), ("turns", 1), ("blocks", 1), ("evictions", 0), ("compression", 0)):
        assert query(store, f"SELECT count(*) FROM {table}") == [(rows,)]
    assert query(store, "SELECT status FROM turns") == [("running",)]


def test_an_id_is_given_once(store):
    add_session(store)
    put(store, writing.begin_turn, "s1", "t1", "?")
    add_eviction(store, 1)
    for work in (
        partial(writing.insert_session, session=session_record("s1"), system=block("other", "system", 0)),
        partial(writing.insert_blocks, session_id="s1", blocks=[block("s1.system")]),
        partial(writing.begin_turn, session_id="s1", turn_id="t1", question="?"),
        partial(writing.insert_eviction, eviction=eviction(1), point=point()),
    ):
        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            put(store, work)
    assert [query(store, f"SELECT count(*) FROM {table}") for table in ("sessions", "blocks", "compression")] == [
        [(1,)]
    ] * 3


def test_blocks_keep_stream_order_and_every_value(store):
    add_session(store)
    stored = [
        block("z", "prose", 1, document_id="d", passage_id="p", name="a.md", heading="A > B", score=0.1),
        block("a", "code", 1, tokens=7),
    ]
    stored += [block(f"many{n}", "prose", 2) for n in range(250)]
    put(store, writing.insert_blocks, "s1", stored)
    assert store.blocks("s1", None, 1000).items[1:] == [b.record for b in stored]
    assert store.resident("s1")[1:] == stored
    assert store.resident("s1")[0].token_ids == [1, 70_000, len("s1.system")]


def test_an_evicted_block_is_dropped_and_logged_with_the_figures_after_it(store):
    add_session(store)
    put(store, writing.insert_blocks, "s1", [block("b1", document_id="d1"), block("b2", document_id="d2")])
    row = add_eviction(store, 1, score=0.75, created_at="2026-02-01T00:00:00.001Z")
    dropped, kept = store.blocks("s1", None, 10).items[1:]
    assert (dropped.state, dropped.score, dropped.evicted_at) == ("dropped", 0.75, row.created_at)
    assert kept == block("b2", document_id="d2").record
    assert [b.record.id for b in store.resident("s1")] == ["s1.system", "b2"]
    assert store.resident_documents("s1") == ["d2"]
    assert store.evictions(EvictionFilter(), None, 10).items == [row]
    assert store.compression("s1", None, 10).items == [point("t1", 1)]


def test_documents_of_resident_blocks_are_named_once(store):
    add_session(store)
    put(store, writing.insert_blocks, "s1", [block("b1", document_id="d"), block("b3", document_id="d"), block("b4")])
    assert store.resident_documents("s1") == ["d"]


def busy(store: Store, turns: int = 7) -> Callable[[], None]:
    """Two sessions with rows in every table, those of the second between those of the first; adds one more of each."""
    for id in ("s1", "s2"):
        add_session(store, id)
    numbers = itertools.count()

    def more() -> None:
        n = next(numbers)
        add_session(store, f"new{n}")
        for id in ("s1", "s2"):
            add_turn(store, id, f"{id}.t{n}")
            add_eviction(store, 2 * n + (id == "s2"), session_id=id, turn_id=f"{id}.t{n}")

    for _ in range(turns):
        more()
    return more


LISTS: dict[str, tuple[Callable[[Store], Lister], Callable[[Any], Any], str]] = {
    "blocks": (
        lambda store: partial(store.blocks, "s1"),
        lambda item: (item.id,),
        "SELECT id FROM blocks WHERE session_id = 's1' ORDER BY seq",
    ),
    "messages": (
        lambda store: partial(store.messages, "s1"),
        lambda item: (item.turn_id, item.role),
        """SELECT id, role FROM turns, (SELECT 'user' AS role UNION ALL SELECT 'assistant')
           WHERE session_id = 's1' ORDER BY seq, role DESC""",
    ),
    "compression": (
        lambda store: partial(store.compression, "s1"),
        lambda item: (item.turn_id, item.step),
        "SELECT turn_id, step FROM compression WHERE session_id = 's1' ORDER BY seq",
    ),
    "evictions": (
        lambda store: partial(store.evictions, EvictionFilter()),
        lambda item: (item.id,),
        "SELECT id FROM evictions ORDER BY seq",
    ),
    "evictions of one session": (
        lambda store: partial(store.evictions, EvictionFilter(session_id="s1")),
        lambda item: (item.id,),
        "SELECT id FROM evictions WHERE session_id = 's1' ORDER BY seq",
    ),
}


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", LISTS)
def test_pages_visit_each_row_once_in_order_while_rows_are_added(store, name, limit):
    page, key, sql = LISTS[name]
    more, additions = busy(store), iter(range(3))
    before = query(store, sql)

    def between() -> None:
        if next(additions, None) is not None:
            more()

    items = walk(page(store), limit, between, items_of_one=2 if name == "messages" else 1)
    rows = query(store, sql)
    assert [key(item) for item in items] == rows
    assert rows[: len(before)] == before
    assert (len(rows) > len(before)) == (limit < 1000)


@pytest.mark.parametrize("limit", [1, 2, 9, 1000])
def test_sessions_are_visited_newest_first_without_those_added_meanwhile(store, limit):
    more = busy(store)
    rows = query(store, "SELECT id FROM sessions ORDER BY seq DESC")
    assert [(session.id,) for session in walk(store.sessions, limit, more)] == rows
    assert len(rows) == 9
    assert store.sessions(None, 1).items[0].id not in {id for (id,) in rows} or limit >= 9


def test_the_first_page_of_sessions_begins_at_the_newest_however_many_there_were(store):
    add_session(store, "old")
    put(store, lambda db: db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'sessions'", [2**62]).rowcount)
    add_session(store, "new")
    assert [session.id for session in walk(store.sessions, 1)] == ["new", "old"]


def test_a_page_of_messages_has_whole_turns(store):
    busy(store, 3)
    first = store.messages("s1", None, 2)
    assert [message.role for message in first.items] == ["user", "assistant"] * 2
    assert [message.turn_id for message in store.messages("s1", first.next_cursor, 2).items] == ["s1.t2"] * 2


def test_an_empty_list_and_a_full_last_page_have_no_next_cursor(store):
    assert store.sessions(None, 1) == Page(items=[], next_cursor=None)
    for n in range(4):
        add_session(store, f"s{n}")
    first = store.sessions(None, 2)
    assert first.next_cursor is not None
    assert store.sessions(first.next_cursor, 2).next_cursor is None
    assert store.sessions(None, 4).next_cursor is None
    assert store.sessions(None, 3).next_cursor is not None


def lists(store: Store) -> list[Lister]:
    return [store.sessions, *(page(store) for page, _, _ in LISTS.values())]


@pytest.mark.parametrize("limit", [0, -1, 1001, 10**30])
def test_a_limit_out_of_bounds_is_invalid_input(store, limit):
    add_session(store)
    for page in lists(store):
        with pytest.raises(InvalidInput) as caught:
            page(None, limit)
        assert caught.value.field == "limit"
        assert str(caught.value) == f"limit: {limit} is not accepted; it must be between 1 and 1000"


@pytest.mark.parametrize("cursor", ["bogus", "MTA=", "é", "-1", encode_cursor(2**63)])
def test_a_bad_cursor_is_invalid_input(store, cursor):
    add_session(store)
    for page in lists(store):
        with pytest.raises(InvalidInput) as caught:
            page(cursor, 10)
        assert caught.value.field == "cursor"
        assert str(caught.value).startswith(f"cursor: {cursor!r} is not accepted")


def test_a_cursor_is_the_row_after_which_the_next_page_starts(store):
    busy(store, 3)
    for page in (store.sessions, partial(store.evictions, EvictionFilter())):
        first = page(None, 2)
        assert page(first.next_cursor, 1000).items == page(None, 1000).items[2:]
    assert store.evictions(EvictionFilter(), encode_cursor(2**63 - 1), 10).items == []
    assert decode_cursor(str(store.evictions(EvictionFilter(), None, 2).next_cursor)) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.session("nope"),
        lambda store: store.messages("nope", None, 10),
        lambda store: store.blocks("nope", None, 10),
        lambda store: store.compression("nope", None, 10),
    ],
)
def test_an_unknown_session_is_not_found(store, call):
    add_session(store)
    with pytest.raises(NotFound) as caught:
        call(store)
    assert (caught.value.what, caught.value.id) == ("session", "nope")


# Filters.

FILTERS = {
    "session_id": ["s1", "s2"],
    "turn_id": ["t1", "t2"],
    "kind": ["prose", "question"],
    "reason": ["room_for_turn", "room_for_answer", "document_deleted"],
    "document_id": ["d1", "d2", None],
    "passage_id": ["p1", "p2", None],
}
DAYS = [f"2026-02-{day:02}T12:00:00.000Z" for day in (1, 2, 3)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """An eviction for each way to choose, in an order in which no column is sorted."""
    database = Database(tmp_path_factory.mktemp("log") / "audit.db", schema.migrations)
    rows = list(itertools.product(*FILTERS.values(), DAYS))
    rows = [rows[n * 7 % len(rows)] for n in range(len(rows))]

    def fill(db: sqlite_utils.Database) -> None:
        for n, values in enumerate(rows):
            names = [*FILTERS, "created_at"]
            writing.insert_eviction(db, eviction(n, **dict(zip(names, values, strict=True))), point())

    database.write(fill).result()
    yield Store(database)
    database.close()


CHOICES = [(name, value) for name, values in FILTERS.items() for value in values if value]
CHOICES += [("since", DAYS[1]), ("until", DAYS[1])]


@pytest.mark.parametrize(
    "chosen",
    [(), *((choice,) for choice in CHOICES), *(p for p in itertools.combinations(CHOICES, 2) if p[0][0] != p[1][0])],
    ids=lambda chosen: " ".join(f"{name}={value[:16]}" for name, value in chosen) or "none",
)
def test_filters_alone_and_two_together_agree_with_the_file(log, chosen):
    found = log.evictions(EvictionFilter(**dict(chosen)), None, 1000).items
    columns = {"since": "created_at >= ?", "until": "created_at <= ?"}
    where = " AND ".join([columns.get(name, f"{name} = ?") for name, _ in chosen] or ["1"])
    rows = query(log, f"SELECT id FROM evictions WHERE {where} ORDER BY seq", *(value for _, value in chosen))
    assert [(row.id,) for row in found] == rows
    assert 0 < len(rows) <= 648
    assert chosen == () or len(rows) < 648


def test_all_filters_together_hold(log):
    every = dict(session_id="s2", turn_id="t1", kind="question", reason="document_deleted", document_id="d2")
    (found,) = log.evictions(EvictionFilter(**every, passage_id="p1", since=DAYS[1], until=DAYS[1]), None, 10).items
    assert found.created_at == DAYS[1]
    assert {name: getattr(found, name) for name in every} == every


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_that_nothing_matches_finds_nothing(log, name):
    for value in ("", "nope", "' OR 1=1 --", "s_", "%"):
        if name in ("kind", "reason"):
            # A misspelt one would look like an answer.
            with pytest.raises(InvalidInput, match="it must be one of"):
                log.evictions(EvictionFilter(**{name: value}), None, 10)
        else:
            assert log.evictions(EvictionFilter(**{name: value}), None, 10) == Page(items=[], next_cursor=None)


def test_filtered_pages_visit_each_row_once(log):
    page = partial(log.evictions, EvictionFilter(kind="prose", document_id="d1"))
    assert walk(page, 7) == page(None, 1000).items
    assert len(page(None, 1000).items) == 108


@pytest.mark.parametrize(
    ("since", "until", "days"),
    [
        (DAYS[1], None, [1, 2]),
        (None, DAYS[1], [0, 1]),
        (DAYS[1], DAYS[1], [1]),
        ("2026-02-02T12:00:00Z", "2026-02-02T12:00:00Z", [1]),
        ("2026-02-02T12:00:00", "2026-02-02T12:00:00.000", [1]),
        ("2026-02-02T14:00:00+02:00", "2026-02-02T14:00:00+02:00", [1]),
        ("2026-02-02T17:30:00+05:30", "2026-02-02T04:00:00.000000-08:00", [1]),
        ("2026-02-02T12:00:00+02:00", "2026-02-02T12:00:00-02:00", [1]),
        ("2026-02-03T01:59:59.999+14:00", "2026-02-02T00:00:00.001-12:00", [1]),
        ("2026-02-03T02:00:00.001+14:00", None, [2]),
        (None, "2026-02-01T23:59:59.999-12:00", [0]),
        ("2026-02-02T12:00:00.001Z", None, [2]),
        (None, "2026-02-02T11:59:59.999Z", [0]),
        ("2026-02-02", "2026-02-03", [1]),
        ("20260202T120000Z", None, [1, 2]),
        (DAYS[2], DAYS[0], []),
        ("0001-01-01", "9999-12-31T23:59:59.999Z", [0, 1, 2]),
    ],
)
def test_times_are_inclusive_and_of_any_zone(log, since, until, days):
    found = log.evictions(EvictionFilter(since=since, until=until, turn_id="t1"), None, 1000).items
    assert sorted({row.created_at for row in found}) == [DAYS[day] for day in days]
    assert len(found) == 108 * len(days)


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "2026-02-30", " 2026-02-01", "2026-02-01T12:00 00:00"])
@pytest.mark.parametrize("name", ["since", "until"])
def test_a_bad_time_is_invalid_input(log, name, text):
    with pytest.raises(InvalidInput) as caught:
        log.evictions(EvictionFilter(**{name: text}), None, 10)
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}: {text!r} is not accepted; it must be ISO 8601")


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"])
def test_a_time_beyond_the_calendar_is_invalid_input(log, text):
    with pytest.raises(InvalidInput):
        log.evictions(EvictionFilter(since=text), None, 10)


def test_since_does_not_take_in_what_was_before_it_by_less_than_a_millisecond(log):
    found = log.evictions(EvictionFilter(since="2026-02-02T12:00:00.000500Z"), None, 1000).items
    assert {row.created_at for row in found} == {DAYS[2]}


@pytest.mark.parametrize(
    ("state", "kind", "ids"),
    [
        (None, None, ["s1.system", "b1", "b2", "b3"]),
        ("resident", None, ["s1.system", "b2"]),
        ("dropped", None, ["b1", "b3"]),
        (None, "code", ["b2", "b3"]),
        ("dropped", "code", ["b3"]),
        ("resident", "answer", []),
    ],
)
def test_blocks_are_filtered_by_state_and_kind(store, state, kind, ids):
    add_session(store)
    add_session(store, "s2")
    put(store, writing.insert_blocks, "s1", [block("b1"), block("b2", "code"), block("b3", "code")])
    for n in (1, 3):
        add_eviction(store, n)
    assert [b.id for b in store.blocks("s1", None, 10, state, kind).items] == ids
    assert [b.id for b in walk(lambda cursor, limit: store.blocks("s1", cursor, limit, state, kind), 1)] == ids


# The file.


def test_recovery_fails_running_turns_and_no_others(store):
    add_session(store)
    assert put(store, writing.recover) == 0
    add_turn(store, "s1", "done")
    for turn_id in ("failed", "running", "also running"):
        put(store, writing.begin_turn, "s1", turn_id, "?")
    put(store, writing.fail_turn, "failed", {"detail": "first"})
    assert put(store, writing.recover) == 2
    detail = "The process stopped during this turn."
    assert query(store, "SELECT id, status, problem ->> 'detail', finished_at IS NULL FROM turns ORDER BY seq") == [
        ("done", "done", None, 0),
        ("failed", "failed", "first", 0),
        ("running", "failed", detail, 0),
        ("also running", "failed", detail, 0),
    ]
    assert put(store, writing.recover) == 0


def test_deleting_a_session_keeps_its_evictions_and_compression_but_none_of_its_text(store):
    busy(store, 2)
    kept = [query(store, f"SELECT * FROM {table}") for table in ("evictions", "compression")]
    others = {id: store.session(id) for id in ("s2", "new0", "new1")}
    others_blocks, others_messages = store.blocks("s2", None, 100), store.messages("s2", None, 100)
    put(store, writing.delete_session, "s1")
    assert [query(store, f"SELECT * FROM {table}") for table in ("evictions", "compression")] == kept
    assert len(store.evictions(EvictionFilter(session_id="s1"), None, 100).items) == 2
    for table, column in (("sessions", "id"), ("turns", "session_id"), ("blocks", "session_id")):
        assert query(store, f"SELECT count(*) FROM {table} WHERE {column} = 's1'") == [(0,)]
    with pytest.raises(NotFound):
        store.session("s1")
    assert {id: store.session(id) for id in others} == others
    assert (store.blocks("s2", None, 100), store.messages("s2", None, 100)) == (others_blocks, others_messages)


def test_migrations_are_applied_once_and_reopening_keeps_rows(tmp_path):
    path = tmp_path / "audit.db"
    for n in range(3):
        database = Database(path, schema.migrations)
        store = Store(database)
        assert [s.id for s in store.sessions(None, 10).items] == [f"s{i}" for i in reversed(range(n))]
        applied = query(store, "SELECT migration_set, name FROM _sqlite_migrations ORDER BY id")
        names = (
            "create_tables",
            "create_bank_tables",
            "create_exchanges",
            "create_forks",
            "create_moments",
            "create_chains",
        )
        assert applied == [("audit", name) for name in names]
        add_session(store, f"s{n}")
        add_eviction(store, n)
        database.close()
    assert list(tmp_path.iterdir()) == [path]


def test_others_read_the_file_as_it_is_documented(store):
    busy(store, 2)
    put(store, writing.insert_blocks, "s1", [block("b", score=0.5)])
    row = eviction(9, bytes_freed=2**40)
    put(store, writing.insert_eviction, row, point())
    columns = ", ".join(Eviction.__struct_fields__)
    assert query(store, f"SELECT {columns} FROM evictions WHERE id = 'e9'") == [msgspec.structs.astuple(row)]
    assert query(store, "SELECT token_ids FROM blocks WHERE id = 'b'") == [
        (bytes([1, 0, 0, 0, 112, 17, 1, 0, 1, 0, 0, 0]),)
    ]
    assert query(store, "SELECT session_id, sum(tokens) FROM evictions GROUP BY 1") == [("s1", 9), ("s2", 6)]
    resident = query(store, "SELECT sum(tokens) FROM blocks WHERE session_id = 's1' AND state = 'resident'")
    assert resident == [(store.session("s1").resident_tokens,)]
    assert query(store, "PRAGMA integrity_check") == [("ok",)]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_tokens_come_back(token_ids):
    blob = pack(token_ids)
    assert unpack(blob) == token_ids
    assert len(blob) == 4 * len(token_ids)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_does_not_fit_32_bits_is_not_packed(token):
    with pytest.raises(OverflowError):
        pack([token])


def test_tokens_are_packed_little_endian():
    assert pack([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"
