from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.service import Service, towns


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One server for all tests that neither need settings of their own nor delete what others use."""
    service = Service(tmp_path_factory.mktemp("data"))
    service.ingest(*towns())
    yield service
    service.stop()
