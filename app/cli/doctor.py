"""What `keepwhole doctor` finds out: device, BLAS and its speed, model, settings, and what is missing."""

from __future__ import annotations

import platform
import re
import sqlite3
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.settings import PREFIX, Settings
from ingest.embedder import EmbedderError
from ingest.embedders import check_embedder

if TYPE_CHECKING:
    from kv.cpu.blas import Blas

_PACKAGES = ("mlx", "mlx-lm", "litestar", "msgspec", "sqlite-utils", "structlog", "uvicorn")
_SIZE = 768


def measure_matmul() -> float:
    """GFLOP/s of a float32 matrix product on MLX's default device: reference BLAS shows as single digits."""
    import mlx.core as mx

    a = mx.random.normal((_SIZE, _SIZE))
    mx.eval(a @ a)
    started = time.perf_counter()
    mx.eval(a @ a)
    return 2 * _SIZE**3 / (time.perf_counter() - started) / 1e9


def report(settings: Settings, blas: Blas) -> tuple[list[tuple[str, str]], list[str]]:
    """(facts, warnings): facts are (name, value) lines; a warning says what to do."""
    import mlx.core as mx

    from kv.model import smollm2

    warnings: list[str] = []
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    facts = [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("sqlite", sqlite3.sqlite_version),
        *((name, _version(name)) for name in _PACKAGES),
        ("device", str(mx.default_device())),
        ("blas", blas.name + (f" ({blas.note})" if blas.note else "")),
        ("matmul", f"{measure_matmul():.0f} GFLOP/s in float32"),
    ]
    if on_cpu and not blas.tuned:
        warnings.append(
            "MLX runs on reference BLAS; install libblis4-pthread or faiss-cpu for 10 to 30 times the speed"
        )
    if settings.model == smollm2.NAME:
        try:
            facts.append(("model file", str(smollm2.gguf_path())))
        except FileNotFoundError as error:
            warnings.append(str(error))
    elif Path(settings.model).expanduser().is_dir():
        facts.append(("model folder", settings.model))
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", settings.model):
        warnings.append(f"model {settings.model!r} is neither the embedded {smollm2.NAME}, a folder, nor a hub name")
    try:
        check_embedder(settings.embedder)
    except EmbedderError as error:
        warnings.append(f"{PREFIX}EMBEDDER: {error}")
    if (reason := _unusable(settings.folder)) is not None:
        warnings.append(f"the data folder cannot be used: {reason}")
    if not _has_fts5():
        warnings.append("this Python's SQLite has no FTS5; search will not work")
    if sys.platform not in ("darwin", "linux"):
        warnings.append(f"{sys.platform} is not tested; macOS and Linux are")
    for name in Settings.__struct_fields__:
        value = getattr(settings, name)
        facts.append((f"{PREFIX}{name.upper()}", "set" if name == "api_key" and value else _shown(value)))
    return facts, warnings


def _unusable(folder: Path) -> str | None:
    """Why nothing can be written into `folder`, or into the nearest folder above it that exists."""
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return str(error)


def _shown(value: object) -> str:
    return "not set" if value is None else str(msgspec.to_builtins(value, enc_hook=str))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _has_fts5() -> bool:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE VIRTUAL TABLE t USING fts5 (text)")
    except sqlite3.Error:
        return False
    finally:
        connection.close()
    return True
