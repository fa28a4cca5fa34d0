"""mlx-lm's model files and caches without the rest of mlx-lm, whose import takes a second and 60 MB, for transformers.

`import mlx_lm.models.cache` runs `mlx_lm/__init__.py` first, which imports everything there is. Here the package is
entered as it is on disk, and its `__init__` runs when something is asked for that only it defines: `mlx_lm.load`, say.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from typing import Any

_running = threading.RLock()


def enter_mlx_lm() -> None:
    """Do so, unless mlx-lm has been imported already, by whom ever. Does nothing where it is not installed."""
    if "mlx_lm" in sys.modules or (spec := importlib.util.find_spec("mlx_lm")) is None or spec.loader is None:
        return
    module: Any = importlib.util.module_from_spec(spec)
    loader = spec.loader

    entered = False

    def missing(name: str) -> Any:
        nonlocal entered
        with _running:
            if "__getattr__" in vars(module):
                if entered:
                    # Its own `__init__` asks, in the midst of it. Other threads wait until it has ended.
                    raise AttributeError(f"module 'mlx_lm' has no attribute {name!r}")
                entered = True
                try:
                    loader.exec_module(module)
                finally:
                    entered = False
                del module.__getattr__
        return getattr(module, name)

    module.__getattr__ = missing
    sys.modules["mlx_lm"] = module
