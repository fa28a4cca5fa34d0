"""Which BLAS MLX uses on the CPU, and how a tuned one is put in place.

MLX's Linux CPU wheel links reference BLAS. A tuned library that is loaded with global symbols *before*
`mlx.core` is imported interposes `cblas_sgemm`, and prefill gets 10 to 30 times faster. On macOS MLX uses
Accelerate and Metal, and nothing is loaded. This module imports no MLX.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Debian and Ubuntu put BLIS and OpenBLAS here (`apt install libblis4-pthread`); BLIS decodes a little faster.
_SYSTEM_ROOTS = (Path("/usr/lib"), Path("/usr/lib64"))
_SYSTEM_GLOBS = (
    ("BLIS (system)", "blis-pthread/libblas.so.3"),
    ("OpenBLAS (system)", "openblas-pthread/libblas.so.3"),
)
# In load order: the wheel's OpenBLAS needs its own runtime libraries resident first.
_WHEEL_PARTS = ("libquadmath*", "libgfortran*", "libgomp*", "libopenblas*")


# The wheel's OpenBLAS runs on OpenMP, whose threads by default spin while they wait for each other. With one other busy
# process on two cores, decoding took 3 times as long (tests/benchmarks/blas.py --busy 1); asleep, they cost nothing.
_WHEEL_ENVIRONMENT = (("OMP_WAIT_POLICY", "PASSIVE"),)


@dataclass(frozen=True)
class Blas:
    """A BLAS for MLX. `libraries` are loaded in this order; `tuned` is False for reference BLAS.

    environment: variables to set before they are loaded, unless the user has set them.
    """

    name: str
    tuned: bool
    libraries: tuple[Path, ...] = ()
    note: str = ""
    environment: tuple[tuple[str, str], ...] = ()


# What this process has loaded.
_loaded: list[Blas] = []

ACCELERATE = Blas("Accelerate", tuned=True)
REFERENCE = Blas("reference BLAS", tuned=False, note="10 to 30 times slower than a tuned one")


def choose(
    setting: str = "auto",
    *,
    platform: str = sys.platform,
    system_roots: Sequence[Path] = _SYSTEM_ROOTS,
    wheel_libs: Path | None = None,
) -> Blas:
    """The BLAS to use, decided from its arguments alone.

    `setting` is `auto` (a system BLIS, then the OpenBLAS in the faiss-cpu wheel, then a system OpenBLAS),
    `reference`, or the path of a shared library with plain `cblas_*` symbols.

    Raises ValueError when `setting` names no file.
    """
    if setting not in ("auto", "reference"):
        path = Path(setting)
        if not path.is_file():
            raise ValueError(f"blas: {setting!r} is not 'auto', 'reference' or an existing library file")
        return Blas(path.name, tuned=True, libraries=(path,))
    if platform == "darwin":
        return ACCELERATE
    if setting == "reference":
        return REFERENCE
    system = {
        name: next((p for root in system_roots for p in sorted(root.glob(f"*/{pattern}"))), None)
        for name, pattern in _SYSTEM_GLOBS
    }
    if blis := system["BLIS (system)"]:
        return Blas("BLIS (system)", tuned=True, libraries=(blis,))
    if wheel_libs is not None and (parts := _wheel_parts(wheel_libs)):
        return Blas("OpenBLAS (faiss-cpu wheel)", tuned=True, libraries=parts, environment=_WHEEL_ENVIRONMENT)
    if openblas := system["OpenBLAS (system)"]:
        return Blas("OpenBLAS (system)", tuned=True, libraries=(openblas,))
    return REFERENCE


def load(
    setting: str = "auto",
    *,
    system_roots: Sequence[Path] = _SYSTEM_ROOTS,
    opener: Callable[..., object] = ctypes.CDLL,
) -> Blas:
    """Choose a BLAS and load it. Call it before anything imports `mlx.core`.

    Falls back to reference BLAS, with the reason in `note`, when a library cannot be loaded or MLX came first.
    """
    blas = choose(setting, system_roots=system_roots, wheel_libs=_faiss_wheel_libs())
    if not blas.libraries:
        return blas
    if "mlx.core" in sys.modules:
        if blas in _loaded and opener is ctypes.CDLL:
            # In time, by an earlier call.
            return blas
        return Blas(REFERENCE.name, tuned=False, note="MLX was imported before a tuned BLAS could be loaded")
    for name, value in blas.environment:
        os.environ.setdefault(name, value)
    try:
        for library in blas.libraries:
            opener(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return Blas(REFERENCE.name, tuned=False, note=f"{blas.name} did not load: {error}")
    _give_numpy_one_thread()
    if opener is ctypes.CDLL:
        _loaded.append(blas)
    return blas


def numpy_sgemm() -> int:
    """The address of the `cblas_sgemm`, with sizes of 64 bits, of the OpenBLAS inside NumPy's wheel; 0 without one.

    It is held to one thread: callers bring their own.
    """
    from threadpoolctl import ThreadpoolController

    importlib.import_module("numpy")
    for library in ThreadpoolController().select(prefix="libscipy_openblas").info():
        function = getattr(ctypes.CDLL(library["filepath"]), "scipy_cblas_sgemm64_", None)
        if function is not None:
            _give_numpy_one_thread()
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _give_numpy_one_thread() -> None:
    """Keep the threads of NumPy's own OpenBLAS out of MLX's way: they spin when their work is done.

    With two of them, a pass that attends in NumPy (`kv.cpu.attention`) took 1.4 times as long on two cores.
    """
    from threadpoolctl import ThreadpoolController

    # So that its library is there to be found.
    importlib.import_module("numpy")
    ThreadpoolController().select(prefix="libscipy_openblas").limit(limits=1)


def _faiss_wheel_libs() -> Path | None:
    spec = importlib.util.find_spec("faiss")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).parent / "faiss_cpu.libs"


def _wheel_parts(folder: Path) -> tuple[Path, ...]:
    parts = tuple(path for pattern in _WHEEL_PARTS for path in sorted(folder.glob(pattern)))
    return parts if any(path.name.startswith("libopenblas") for path in parts) else ()
