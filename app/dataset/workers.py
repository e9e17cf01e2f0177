"""Work that waits for others, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


async def work_off(
    items: Iterable[Item], work: Callable[[Item], Awaitable[None]], concurrency: int
) -> None:
    """In order of beginning. The first error ends all of it, and is raised as it is."""
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
