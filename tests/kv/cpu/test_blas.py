"""Which BLAS is chosen, decided by argument."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest
from threadpoolctl import threadpool_info

from kv import blas
from tests.conftest import BLAS

WHEEL = ("libquadmath-1.so", "libgfortran-1.so", "libgomp-1.so", "libopenblaso-1.so")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "faiss_cpu.libs"
    folder.mkdir()
    for name in WHEEL:
        (folder / name).touch()
    return folder


def system(root: Path, name: str) -> Path:
    path = root / "x86_64-linux-gnu" / name / "libblas.so.3"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_macos_loads_nothing(wheel: Path) -> None:
    assert blas.choose(platform="darwin", wheel_libs=wheel) == blas.ACCELERATE


def test_the_wheels_libraries_load_in_the_order_they_depend_on_each_other(wheel: Path, tmp_path: Path) -> None:
    chosen = blas.choose(platform="linux", wheel_libs=wheel, system_roots=[tmp_path])
    assert chosen.tuned
    assert [path.name for path in chosen.libraries] == list(WHEEL)


def test_blis_of_the_system_comes_first_and_its_openblas_last(wheel: Path, tmp_path: Path) -> None:
    openblas = system(tmp_path, "openblas-pthread")
    assert blas.choose(platform="linux", system_roots=[tmp_path]).libraries == (openblas,)
    assert "wheel" in blas.choose(platform="linux", wheel_libs=wheel, system_roots=[tmp_path]).name
    blis = system(tmp_path, "blis-pthread")
    assert blas.choose(platform="linux", wheel_libs=wheel, system_roots=[tmp_path]).libraries == (blis,)


def test_nothing_found_is_reference_blas_and_says_so(tmp_path: Path) -> None:
    chosen = blas.choose(platform="linux", system_roots=[tmp_path], wheel_libs=tmp_path)
    assert not chosen.tuned
    assert "slower" in chosen.note


def test_a_path_is_taken_as_given_and_must_exist(tmp_path: Path) -> None:
    library = tmp_path / "libmine.so"
    with pytest.raises(ValueError, match=r"libmine\.so"):
        blas.choose(str(library))
    library.touch()
    assert blas.choose(str(library), platform="linux").libraries == (library,)


def test_a_library_that_does_not_load_falls_back_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libbroken.so"
    library.write_bytes(b"not a library")
    monkeypatch.delitem(__import__("sys").modules, "mlx.core", raising=False)
    loaded = blas.load(str(library))
    assert not loaded.tuned
    assert "libbroken.so did not load" in loaded.note


def test_loading_after_mlx_is_reported_not_pretended(tmp_path: Path) -> None:
    import mlx.core  # noqa: F401

    library = tmp_path / "liblate.so"
    library.touch()
    opened: list[str] = []
    loaded = blas.load(str(library), opener=lambda path, mode: opened.append(path) or ctypes.c_int())
    assert not loaded.tuned
    assert "before" in loaded.note
    assert not opened


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_the_wheels_threads_sleep_while_they_wait_unless_the_user_says_otherwise(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setattr(blas, "_faiss_wheel_libs", lambda: wheel)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    # setenv first, so that the variable is put back as it was.
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        del os.environ["OMP_WAIT_POLICY"]
    seen: list[str | None] = []
    loaded = blas.load(
        system_roots=[tmp_path], opener=lambda path, mode: seen.append(os.environ.get("OMP_WAIT_POLICY"))
    )
    if loaded.libraries:
        assert seen == [expected] * len(loaded.libraries)
    else:
        assert sys.platform == "darwin"


def test_numpys_threads_leave_the_processor_to_mlx() -> None:
    # The BLAS that this run has loaded, see conftest.py.
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["prefix"] == "libscipy_openblas"]
    assert pools == [1] * len(pools) or not BLAS.libraries
