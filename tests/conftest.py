"""A tuned BLAS before anything imports MLX, and the embedded model once a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kv import blas

BLAS = blas.load()

if TYPE_CHECKING:
    from kv import LoadedModel


def pytest_report_header() -> str:
    return f"BLAS for MLX: {BLAS.name} {BLAS.note}"


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    from kv import load_model

    return load_model()
