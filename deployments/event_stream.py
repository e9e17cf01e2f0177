"""One request's events on their way out of a replica: few messages, no wait for the first token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from deployments.messages import EngineEvent, FirstToken


class EventStream:
    """Collects an engine's events as they come, in a task of its own that can be aborted."""

    def __init__(self, events: AsyncIterator[EngineEvent]) -> None:
        self._pending: list[EngineEvent] = []
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()
        self._collecting = asyncio.create_task(self._collect(events))
        self._collecting.add_done_callback(self._ended)

    async def batches(self, interval_s: Callable[[], float]) -> AsyncIterator[list[EngineEvent]]:
        """What follows a batch within the interval travels together, what comes later at once.

        So does the first token, for which someone waits. CancelledError once aborted.
        """
        while True:
            await self._news.wait()
            ended = self._collecting.done()
            batch, self._pending = self._pending, []
            if batch:
                yield batch
            if ended:
                self._collecting.result()
                return
            if not self._collecting.done():
                self._news.clear()
                self._urgent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s()):
                    await self._urgent.wait()

    def abort(self) -> None:
        """Closes the engine's side; nothing happens to a stream that has ended."""
        self._collecting.cancel()

    async def _collect(self, events: AsyncIterator[EngineEvent]) -> None:
        async for event in events:
            self._pending.append(event)
            self._news.set()
            if isinstance(event, FirstToken):
                self._urgent.set()

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._news.set()
        self._urgent.set()
