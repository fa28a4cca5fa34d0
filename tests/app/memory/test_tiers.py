"""K/V that goes down tier by tier, on real files."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from app.memory.tiers import Moved, TieredStore
from kv.caches.blockkv import BlockKV

TOKENS = 4
# Two layers of keys and values, [1, 1, 4, 8] floats.
SIZE = 2 * 2 * TOKENS * 8 * 4
# A file has a header too.
FILE = SIZE + 600


def block(number: int) -> BlockKV:
    arrays = [mx.full((1, 1, TOKENS, 8), float(number + layer)) for layer in range(2)]
    return BlockKV(number, arrays, [array + 0.5 for array in arrays])


def store(folder: Path, moves: list[Moved], *, memory: int, disk: int) -> TieredStore:
    return TieredStore(folder, memory_bytes=memory * SIZE, disk_bytes=disk * FILE, on_move=moves.append)


def said(moves: list[Moved]) -> list[tuple[str, str, str, str]]:
    return [(move.key, move.source, move.target, move.reason) for move in moves]


def test_the_least_recently_used_goes_down_first(tmp_path: Path) -> None:
    moves: list[Moved] = []
    tiers = store(tmp_path, moves, memory=2, disk=2)
    for number in range(2):
        tiers.put(f"k{number}", block(number), "doc")
    assert tiers.get("k0") is not None
    tiers.put("k2", block(2), "doc")
    assert [tiers.where(f"k{i}") for i in range(3)] == ["memory", "disk", "memory"]
    assert said(moves) == [("k1", "memory", "disk", "memory_cap")]
    assert (moves[0].tokens, moves[0].nbytes, moves[0].owner) == (TOKENS, SIZE, "doc")
    for number in range(3, 6):
        tiers.put(f"k{number}", block(number), "doc")
    assert [tiers.where(f"k{i}") for i in range(6)] == [None, None, "disk", "disk", "memory", "memory"]
    assert [move.key for move in moves if move.target == "dropped"] == ["k1", "k0"]
    assert tiers.memory_bytes <= 2 * SIZE
    assert tiers.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * FILE


def test_what_comes_back_from_disk_is_what_went(tmp_path: Path) -> None:
    moves: list[Moved] = []
    tiers = store(tmp_path, moves, memory=1, disk=9)
    for number in range(4):
        tiers.put(f"k{number}", block(number), "doc")
    for number in (1, 0, 3, 2):
        kv = tiers.get(f"k{number}")
        assert kv is not None
        assert kv.start == number
        assert kv.keys[1].tolist() == block(number).keys[1].tolist()
        assert kv.values[0].tolist() == block(number).values[0].tolist()
        assert tiers.where(f"k{number}") == "memory"
    assert tiers.get("nothing") is None


def test_the_next_process_takes_over_what_is_whole(tmp_path: Path) -> None:
    moves: list[Moved] = []
    tiers = store(tmp_path, moves, memory=4, disk=9)
    for number in range(3):
        tiers.put(f"k{number}", block(number), f"doc{number}")
    tiers.close()
    assert {move.reason for move in moves} == {"stopping"}
    (tmp_path / "k9.part.safetensors").write_bytes(b"half")
    damaged = next(path for path in tmp_path.iterdir() if path.name.startswith("k1."))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    foreign = next(path for path in tmp_path.iterdir() if path.name.startswith("k2."))
    foreign.rename(tmp_path / foreign.name.replace("k2.", "k3."))

    later: list[Moved] = []
    again = store(tmp_path, later, memory=4, disk=9)
    assert not list(tmp_path.glob("*.part.*"))
    assert sorted(again.keys) == ["k0", "k1", "k3"]
    kv = again.get("k0")
    assert kv is not None
    assert kv.start == 0
    assert again.get("k1") is None
    assert again.get("k3") is None
    assert said(later) == [("k1", "disk", "dropped", "damaged"), ("k3", "disk", "dropped", "damaged")]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_documents_k_v_is_gone_from_both_tiers(tmp_path: Path) -> None:
    moves: list[Moved] = []
    tiers = store(tmp_path, moves, memory=2, disk=9)
    for number in range(4):
        tiers.put(f"k{number}", block(number), f"doc{number % 2}")
    tiers.get("k1")
    tiers.remove("doc1")
    assert sorted(tiers.keys) == ["k0", "k2"]
    assert {path.name.split(".")[1] for path in tmp_path.iterdir()} <= {"doc0"}
    tiers.keep_owners({"other"})
    assert tiers.keys == []
    assert not list(tmp_path.iterdir())
    dropped = [move for move in moves if move.target == "dropped"]
    assert sorted(move.key for move in dropped) == ["k0", "k1", "k2", "k3"]
    assert {move.reason for move in dropped} == {"deleted"}


@pytest.mark.parametrize(("memory", "disk", "where"), [(0, 2, "disk"), (2, 0, "memory"), (0, 0, None)])
def test_a_tier_may_be_off(tmp_path: Path, memory: int, disk: int, where: str | None) -> None:
    moves: list[Moved] = []
    tiers = store(tmp_path, moves, memory=memory, disk=disk)
    assert tiers.enabled == (where is not None)
    tiers.put("k", block(1), "doc")
    assert tiers.where("k") == where
    assert (tiers.get("k") is None) == (where is None)


def test_a_disk_that_refuses_is_no_failure(tmp_path: Path) -> None:
    moves: list[Moved] = []
    folder = tmp_path / "bank"
    tiers = store(folder, moves, memory=1, disk=9)
    folder.rmdir()
    folder.write_text("in the way")
    tiers.put("k0", block(0), "doc")
    tiers.put("k1", block(1), "doc")
    assert said(moves) == [("k0", "memory", "dropped", "unwritable")]
    assert tiers.where("k1") == "memory"


def test_what_nobody_has_asked_for_is_the_first_to_go(tmp_path: Path) -> None:
    moves: list[Moved] = []
    tiers = store(tmp_path, moves, memory=2, disk=9)
    empty = tiers.room_bytes
    tiers.put("asked", block(0), "doc")
    tiers.put("ahead", block(1), "doc", first_to_go=True)
    assert empty - tiers.room_bytes == 2 * SIZE
    tiers.put("new", block(2), "doc")
    assert [tiers.where(key) for key in ("asked", "ahead", "new")] == ["memory", "disk", "memory"]
