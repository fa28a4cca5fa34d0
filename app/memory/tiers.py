"""Where K/V waits outside caches: in memory, then on disk, each capped in bytes, then nowhere. On the MLX thread."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from app.memory import whole_files
from kv.caches.blockkv import BlockKV

Tier = Literal["memory", "disk"]
Reason = Literal["memory_cap", "disk_cap", "stopping", "deleted", "damaged", "unwritable"]

log = structlog.get_logger()

# key, document, tokens: a file's name says what it is, so that none needs to be opened to know.
_STEM = re.compile(r"(\w+)\.(\w+)\.(\d+)")


@dataclass(frozen=True)
class Moved:
    """K/V that went to another tier, or was dropped. owner: the document or session it is of. nbytes: what it took."""

    key: str
    owner: str
    tokens: int
    nbytes: int
    source: Tier
    target: Literal["disk", "dropped"]
    reason: Reason


@dataclass(frozen=True)
class _File:
    path: Path
    owner: str
    tokens: int
    checksum: str
    nbytes: int


class TieredStore:
    """K/V by key, least recently used first to go: from memory to disk, from disk to nowhere.

    folder: where the disk tier lives; files of an earlier process are taken over. memory_bytes, disk_bytes: the caps;
    0 turns a tier off. on_move: called with everything that goes down a tier.
    """

    def __init__(self, folder: Path, *, memory_bytes: int, disk_bytes: int, on_move: Callable[[Moved], object]) -> None:
        self._folder = folder
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._on_move = on_move
        self._memory: dict[str, tuple[BlockKV, str]] = {}
        self._files: dict[str, _File] = {}
        for path, (key, owner, tokens), checksum in whole_files.left(folder, _STEM):
            self._files[key] = _File(path, owner, int(tokens), checksum, path.stat().st_size)
        self._shrink()

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept at all."""
        return self._memory_bytes > 0 or self._disk_bytes > 0

    @property
    def keys(self) -> list[str]:
        """Everything that is kept."""
        return list({**self._files, **self._memory})

    @property
    def memory_bytes(self) -> int:
        """Bytes held in memory."""
        return sum(kv.nbytes for kv, _ in self._memory.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes held on disk."""
        return sum(file.nbytes for file in self._files.values())

    def where(self, key: str) -> Tier | None:
        """Which tier has it."""
        if key in self._memory:
            return "memory"
        return "disk" if key in self._files else None

    @property
    def room_bytes(self) -> int:
        """Bytes that can be kept without anything having to go. What is in both tiers counts twice."""
        return self._memory_bytes + self._disk_bytes - self.memory_bytes - self.disk_bytes

    def put(self, key: str, kv: BlockKV, owner: str, *, first_to_go: bool = False) -> None:
        """Keep K/V, in memory first. first_to_go: as the least, not the most recently used."""
        self._memory.pop(key, None)
        held = {key: (kv, owner)}
        self._memory = held | self._memory if first_to_go else self._memory | held
        self._shrink()

    def get(self, key: str) -> BlockKV | None:
        """The K/V, which is the most recently used from now on. None if it is nowhere, or its file is damaged."""
        if held := self._memory.pop(key, None):
            self._memory[key] = held
            return held[0]
        file = self._files.get(key)
        if file is None:
            return None
        try:
            kv = BlockKV.load(file.path, key, file.checksum)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            log.warning("stored K/V is damaged and was dropped", file=file.path.name, error=str(error))
            self._drop(key, "damaged")
            return None
        os.utime(file.path)
        self._files[key] = self._files.pop(key)
        # The file stays: should memory need the room, nothing has to be written again.
        self._memory[key] = (kv, file.owner)
        self._shrink()
        return kv

    def remove(self, owner: str) -> None:
        """Drop everything of an owner."""
        for key in [key for key, (_, whose) in self._memory.items() if whose == owner]:
            kv, _ = self._memory.pop(key)
            if key not in self._files:
                self._report(key, owner, kv.tokens, kv.nbytes, "memory", "dropped", "deleted")
        for key in [key for key, file in self._files.items() if file.owner == owner]:
            self._drop(key, "deleted")

    def keep_owners(self, known: Set[str]) -> None:
        """Drop everything whose owner is none of these."""
        owners = {owner for _, owner in self._memory.values()} | {file.owner for file in self._files.values()}
        for owner in owners - known:
            self.remove(owner)

    def close(self) -> None:
        """Write what is in memory to disk, as far as it fits, for the next process."""
        self._memory_bytes = 0
        self._shrink("stopping")

    def _shrink(self, why: Reason = "memory_cap") -> None:
        while self._memory and self.memory_bytes > self._memory_bytes:
            key = next(iter(self._memory))
            kv, owner = self._memory.pop(key)
            if key in self._files:
                target: Literal["disk", "dropped"] = "disk"
                reason = why
            else:
                target, reason = self._write(key, kv, owner, why)
            self._report(key, owner, kv.tokens, kv.nbytes, "memory", target, reason)
        while self._files and self.disk_bytes > self._disk_bytes:
            # What memory has as well is no loss.
            self._drop(next((key for key in self._files if key in self._memory), next(iter(self._files))), "disk_cap")

    def _write(self, key: str, kv: BlockKV, owner: str, why: Reason) -> tuple[Literal["disk", "dropped"], Reason]:
        if kv.nbytes > self._disk_bytes:
            return "dropped", why
        written = whole_files.write(self._folder, f"{key}.{owner}.{kv.tokens}", lambda path: kv.save(path, key))
        if written is None:
            return "dropped", "unwritable"
        path, checksum = written
        self._files[key] = _File(path, owner, kv.tokens, checksum, path.stat().st_size)
        return "disk", why

    def _drop(self, key: str, reason: Reason) -> None:
        file = self._files.pop(key)
        file.path.unlink(missing_ok=True)
        if key not in self._memory:
            self._report(key, file.owner, file.tokens, file.nbytes, "disk", "dropped", reason)

    def _report(
        self,
        key: str,
        owner: str,
        tokens: int,
        nbytes: int,
        source: Tier,
        target: Literal["disk", "dropped"],
        reason: Reason,
    ) -> None:
        self._on_move(Moved(key, owner, tokens, nbytes, source, target, reason))
