"""The one actor that knows the fleet: who serves, where, and each engine's newest snapshot."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray

from deployments.messages import InstanceReport
from deployments.upkeep import raise_if_ended

REPORT_INTERVAL_S = 1.0
SILENT_AFTER_S = 10.0
"""An instance that has not reported for so long is no longer of the fleet."""
POLL_TIMEOUT_S = 20.0
"""A poll without news is answered after this time."""


@dataclass(frozen=True, slots=True)
class FleetVersion:
    hub: str
    """Names one life of the hub: a restarted hub knows nothing yet."""
    number: int


@dataclass(frozen=True, slots=True)
class FleetView:
    version: FleetVersion
    instances: tuple[InstanceReport, ...]


@dataclass(frozen=True, slots=True)
class Sighting:
    report: InstanceReport
    snapshot: bytes | None
    """As ``sfs_ext.Snapshot.from_bytes`` reads it; None before the first."""
    seen_s: float


class Hub:
    """Instances report every second; routers learn of changes by long poll."""

    def __init__(self) -> None:
        self._life = uuid.uuid4().hex
        self._number = 0
        self._sightings: dict[str, Sighting] = {}
        self._changed = asyncio.Condition()
        self._view: ray.ObjectRef | None = None
        self._started_s = time.monotonic()
        self._upkeep = asyncio.create_task(self._keep(), name="the hub's upkeep")

    async def report(self, report: InstanceReport, snapshot: bytes | None) -> None:
        known = self._sightings.get(report.instance_id)
        self._sightings[report.instance_id] = Sighting(report, snapshot, time.time())
        if known is None or known.report != report:
            await self._announce()

    async def remove(self, instance_id: str) -> None:
        """It stopped, or a router found it dead. If it lives, its next report brings it back."""
        if self._sightings.pop(instance_id, None) is not None:
            await self._announce()

    async def fleet(self, after: FleetVersion | None) -> FleetView:
        """The fleet, as soon as it is another than ``after``'s, at the latest at the timeout."""
        if after is not None and after.hub != self._life:
            # Until every living instance has reported, an absent one is not a lost one.
            grace_s = self._started_s + 3 * REPORT_INTERVAL_S - time.monotonic()
            await asyncio.sleep(max(0.0, grace_s))
        async with self._changed:
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S):
                    await self._changed.wait_for(lambda: self._version != after)
            except TimeoutError:
                pass
        reports = (sighting.report for sighting in self._sightings.values())
        return FleetView(self._version, tuple(sorted(reports, key=lambda r: r.instance_id)))

    async def view(self) -> list[Any]:
        """``[ref]``: an object of the store, ``{instance_id: Sighting}``, at most a second old.

        For those who do not route: dashboards, audits, late joiners.
        """
        return [self._put_view() if self._view is None else self._view]

    async def check_health(self) -> None:
        raise_if_ended(self._upkeep)

    @property
    def _version(self) -> FleetVersion:
        return FleetVersion(self._life, self._number)

    async def _announce(self) -> None:
        async with self._changed:
            self._number += 1
            self._changed.notify_all()

    def _put_view(self) -> ray.ObjectRef:
        self._view = ray.put(dict(self._sightings))
        return self._view

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            horizon_s = time.time() - SILENT_AFTER_S
            for instance_id, sighting in list(self._sightings.items()):
                if sighting.seen_s < horizon_s:
                    await self.remove(instance_id)
            self._put_view()
