"""One real Ray Serve application for all tests of the emulated pool."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from served_pool import Server, serve_pool


@pytest.fixture(scope="session")
def records_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, records_dir: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    pool = folder / "pool.yaml"
    settings = (Path(__file__).parent / "pool.yaml").read_text()
    pool.write_text(settings.replace("RECORDS_DIR", str(records_dir)))
    with serve_pool(pool, folder) as server:
        yield server


@pytest.fixture(scope="session")
def app(server: Server) -> Iterator[DeploymentHandle]:
    """The application's handle, as another Ray application holds it."""
    ray.init(address=server.gcs_address, namespace="serve", log_to_driver=False)
    yield serve.get_app_handle("foretoken")
    ray.shutdown()


@pytest.fixture(autouse=True)
def _app_logs_as_before() -> Iterator[None]:
    """A router in this process has ``app`` log where Serve does; other tests look elsewhere."""
    logger = logging.getLogger("app")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)
