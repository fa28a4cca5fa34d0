"""A tuned BLAS before anything imports MLX, and the embedded model once a run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from kv import blas

# Dozens of processes import the same packages: what they compile of them is kept, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

BLAS = blas.load()

if TYPE_CHECKING:
    from kv import LoadedModel


def pytest_report_header() -> str:
    return f"BLAS for MLX: {BLAS.name} {BLAS.note}"


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    from kv import load_model

    return load_model()
