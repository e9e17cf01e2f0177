"""Tasks that run as long as their replica: one that has ended must not go unnoticed."""

from __future__ import annotations

import asyncio


def raise_if_ended(*tasks: asyncio.Task[None]) -> None:
    """For ``check_health``, after which Serve starts the replica anew. RuntimeError."""
    for task in tasks:
        if task.done():
            error = None if task.cancelled() else task.exception()
            raise RuntimeError(f"{task.get_name()} has ended: {error!r}") from error
