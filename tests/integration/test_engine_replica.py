"""The replica around an engine, without Serve: when and what it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from in_process import Handle, LocalHub

from app.config import PoolSettings
from deployments import engine as engine_module
from deployments.engine import EngineReplica
from sfs_ext import SnapshotWriter, batch_dtype, resident_dtype


class Replica(EngineReplica):
    def __del__(self) -> None:
        """Serve awaits the destructor; here the test does."""


class ListeningHub(LocalHub):
    def __init__(self) -> None:
        super().__init__()
        self.heard: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def report(self, report: Any, snapshot: bytes | None) -> None:
        await super().report(report, snapshot)
        self.heard.put_nowait(snapshot)


@pytest.fixture(autouse=True)
def without_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    node = SimpleNamespace(get_node_id=lambda: "this-node")
    monkeypatch.setattr(engine_module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(engine_module.ray, "get_runtime_context", lambda: node)
    monkeypatch.setattr(engine_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(engine_module, "SNAPSHOT_DIR", tmp_path)
    monkeypatch.setattr(engine_module, "REPORT_INTERVAL_S", 0.01)


@asynccontextmanager
async def replica_and_hub() -> AsyncIterator[tuple[EngineReplica, ListeningHub]]:
    pool = yaml.safe_load((Path(__file__).parent / "pool.yaml").read_text())
    model = PoolSettings.model_validate(pool).models[0]
    hub = ListeningHub()
    replica: Any = object.__new__(Replica)
    await replica.__init__(model, Handle(hub))
    try:
        async with asyncio.timeout(20):
            yield replica, hub
    finally:
        await EngineReplica.__del__(replica)
        hub._upkeep.cancel()


def test_it_is_announced_once_serve_routes_to_it() -> None:
    async def scenario() -> None:
        async with replica_and_hub() as (replica, hub):
            await replica.check_health()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(hub.heard.get(), 0.2)
            await replica.check_health()
            await hub.heard.get()
            assert [r.model for r in (await hub.fleet(None)).instances] == ["small"]

    asyncio.run(scenario())


def test_reports_go_on_without_a_snapshot_that_contradicts_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with replica_and_hub() as (replica, hub):
            odd = SnapshotWriter(str(tmp_path / "odd"), replica._engine.scheduler)
            relay = engine_module.SnapshotRelay(str(tmp_path / "odd"), "127.0.0.1")
            replica._relay.stop()
            replica._relay = relay
            residents = np.zeros(1, resident_dtype)
            residents["prompt_tokens"] = residents["max_tokens"] = residents["id"] = 1
            residents["status"] = 7
            odd.publish(time.time(), 900, np.zeros(0, batch_dtype), residents)
            for _ in range(2):
                await replica.check_health()
            assert [await hub.heard.get() for _ in range(5)] == [None] * 5
            residents["status"] = 1
            odd.publish(time.time(), 900, np.zeros(0, batch_dtype), residents)
            while await hub.heard.get() is None:
                continue
            await replica.check_health()
            odd.close()

    asyncio.run(scenario())
    assert len([r for r in caplog.records if "snapshot refused" in r.message]) == 1


def test_a_task_that_has_ended_is_no_health() -> None:
    async def scenario() -> None:
        async with replica_and_hub() as (replica, hub):
            for _ in range(2):
                await replica.check_health()
            await hub.heard.get()
            hub.report = lambda *_: 1 / 0  # type: ignore[method-assign]
            await asyncio.wait(replica._upkeep, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(RuntimeError, match="reporting to the hub has ended"):
                await replica.check_health()
            hub._upkeep.cancel()
            await asyncio.gather(hub._upkeep, return_exceptions=True)
            with pytest.raises(RuntimeError, match="the hub's upkeep has ended"):
                await hub.check_health()

    asyncio.run(scenario())
