from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.service import Service, towns
from tests.app.starter import Starter


@pytest.fixture(scope="session", autouse=True)
def starter() -> Iterator[None]:
    """One process that all servers are forked from."""
    Service.starter = Starter()
    yield
    Service.starter.close()
    Service.starter = None


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One server for all tests that neither need settings of their own nor delete what others use."""
    service = Service(tmp_path_factory.mktemp("data"))
    service.ingest(*towns())
    yield service
    service.stop()
