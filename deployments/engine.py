"""The replica around one engine: accepts, streams, aborts, reports itself to the hub."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from app.config import EmulatedEngineSettings, ModelSettings, VllmEngineSettings
from deployments.emulated_engine import EmulatedEngine
from deployments.event_stream import EventStream
from deployments.hub import REPORT_INTERVAL_S
from deployments.messages import (
    Engine,
    EngineEvent,
    EngineRequest,
    InstanceReport,
)
from deployments.snapshots import SnapshotRelay
from deployments.timing import Timing, at_present, given, measured
from deployments.upkeep import raise_if_ended
from deployments.warm_up import warm_up
from sfs_ext import SnapshotReader

logger = logging.getLogger("ray.serve")

SNAPSHOT_DIR = Path("/dev/shm")
SNAPSHOT_PREFIX = "foretoken-"
FLUSH_INTERVAL_S = 0.02
"""Tokens that follow one another closer than this travel together."""
FLUSHES_PER_S = 100 * (os.cpu_count() or 1)
"""Of all the replica's streams together: each costs Serve about a millisecond of a core on its way
to the client, and first tokens must not wait for them."""
MEASURE_INTERVAL_S = 10.0
"""Where batch times are measured: how often, so that they follow the machine's load."""


class EngineReplica:
    async def __init__(self, model: ModelSettings, hub: DeploymentHandle) -> None:
        replica_id = serve.get_replica_context().replica_id.unique_id
        instance_id = f"{model.name}-{replica_id}"
        _unlink_abandoned_snapshots()
        node_ip = ray.util.get_node_ip_address()
        path = str(SNAPSHOT_DIR / f"{SNAPSHOT_PREFIX}{instance_id}")
        self._engine = await _start_engine(model, path)
        self._relay = SnapshotRelay(path, node_ip)
        self._report = InstanceReport(
            instance_id=instance_id,
            model=model.name,
            replica_id=replica_id,
            node_id=ray.get_runtime_context().get_node_id(),
            snapshot_path=path,
            snapshot_endpoint=self._relay.endpoint,
            scheduler=self._engine.scheduler,
            timing=await _timing(model, self._engine),
        )
        self._streams = 0
        self._hub = hub
        self._health_checks = 0
        self._routable = asyncio.Event()
        self._upkeep = [asyncio.create_task(self._keep_reporting(), name="reporting to the hub")]
        if self._report.timing.source == "steps":
            self._upkeep.append(
                asyncio.create_task(self._keep_measuring(), name="measuring batch times")
            )

    async def generate(
        self, request: EngineRequest, replica_id: str
    ) -> AsyncIterator[list[EngineEvent]]:
        """``replica_id`` is for the request router. Closing the call aborts the request."""
        stream = EventStream(self._engine.generate(request))
        self._streams += 1
        try:
            async for batch in stream.batches(self._flush_interval_s):
                yield batch
        finally:
            self._streams -= 1
            stream.abort()

    async def check_health(self) -> None:
        await self._engine.check_health()
        raise_if_ended(*self._upkeep)
        # Serve's first check is the end of the start; with the second it routes to the replica.
        self._health_checks += 1
        if self._health_checks == 2:
            self._routable.set()

    async def __del__(self) -> None:
        for task in self._upkeep:
            task.cancel()
        with contextlib.suppress(TimeoutError, RayError, RayServeException):
            # A hub that has gone already needs no word of it.
            async with asyncio.timeout(1):
                await self._hub.remove.remote(self._report.instance_id)
        self._relay.stop()
        await self._engine.stop()

    def _flush_interval_s(self) -> float:
        return max(FLUSH_INTERVAL_S, self._streams / FLUSHES_PER_S)

    async def _keep_reporting(self) -> None:
        await self._routable.wait()
        while True:
            try:
                await self._hub.report.remote(self._report, self._relay.newest())
            except (RayError, RayServeException) as error:
                # Serve restarts the hub; it learns of us at the next report.
                logger.warning("the hub did not take the report: %s", error)
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _keep_measuring(self) -> None:
        fitted = self._report.timing
        while True:
            await asyncio.sleep(MEASURE_INTERVAL_S)
            try:
                timing = await asyncio.to_thread(at_present, fitted, self._report.snapshot_path)
            except ValueError as error:
                logger.warning("batch times stay as they were: %s", error)
            else:
                self._report = replace(self._report, timing=timing)


async def _start_engine(model: ModelSettings, snapshot_path: str) -> Engine:
    match model.engine:
        case EmulatedEngineSettings():
            return EmulatedEngine(model.engine, model.context_tokens, snapshot_path)
        case VllmEngineSettings():
            # Only a replica that runs vLLM has it installed.
            from deployments.vllm_engine import VllmEngine

            return await VllmEngine.start(model.name, model.engine, snapshot_path)
        case _:
            assert_never(model.engine)


async def _timing(model: ModelSettings, engine: Engine) -> Timing:
    if (settings := model.engine.batch_time) is not None:
        return given(engine.scheduler, settings.batch_time())
    await warm_up(engine, model.name)
    return measured(engine.snapshot_path)


def _unlink_abandoned_snapshots() -> None:
    """A killed process leaves its file in memory until someone removes it."""
    for path in SNAPSHOT_DIR.glob(f"{SNAPSHOT_PREFIX}*"):
        try:
            os.kill(SnapshotReader(str(path)).writer_pid, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (FileNotFoundError, PermissionError, ValueError):
            # Gone meanwhile, another user's, or being created.
            continue
