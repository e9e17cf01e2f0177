"""Published states of engines under load, to forecast from."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sfs_ext import (
    BatchTime,
    SchedulerConfig,
    Snapshot,
    SnapshotReader,
    SnapshotWriter,
    batch_dtype,
    resident_dtype,
)

NOW_S = 1_000_000.0


@contextmanager
def published(config: SchedulerConfig, running: int, waiting: int) -> Iterator[str]:
    """Path of a snapshot at NOW_S: prompts of 100 to 1,000 tokens, answers of 2,000 on average."""
    random = np.random.default_rng(0)
    residents = _residents(config, running, waiting, 2000, random)
    with _writer(config) as (path, writer):
        _publish(writer, config, NOW_S, residents, running)
        yield path


def snapshot_of(
    config: SchedulerConfig,
    batch_time: BatchTime,
    running: int,
    waiting: int,
    random: np.random.Generator,
) -> bytes:
    """A state as it travels between nodes, at NOW_S between one batch's start and its end.

    Prompts of 100 to 1,000 tokens, answers of 400 on average; of ``running`` as many as the KV
    cache holds.
    """
    residents = _residents(config, running, waiting, 400, random)
    room = int(np.searchsorted(np.cumsum(residents["blocks"]), config.num_blocks, side="left"))
    running = min(running, room)
    residents = residents[np.r_[:running, len(residents) - waiting : len(residents)]]
    batch_s = batch_time.seconds(running, int(residents["computed_tokens"].sum()), 0)
    at_s = NOW_S - random.random() * batch_s
    residents["arrival_s"] += at_s - NOW_S
    with _writer(config) as (path, writer):
        _publish(writer, config, at_s, residents, running)
        snapshot = SnapshotReader(path).read()
        assert isinstance(snapshot, Snapshot)
        return snapshot.to_bytes()


def _residents(
    config: SchedulerConfig,
    running: int,
    waiting: int,
    answer_tokens: float,
    random: np.random.Generator,
) -> NDArray[Any]:
    residents = np.zeros(running + waiting, resident_dtype)
    residents["id"] = np.arange(1, len(residents) + 1)
    residents["arrival_s"] = NOW_S - 1
    residents["prompt_tokens"] = random.integers(100, 1000, len(residents))
    residents["max_tokens"] = 16_000
    residents["predicted_output_tokens"] = answer_tokens * random.lognormal(
        -0.125, 0.5, len(residents)
    )
    residents["status"][running:] = 1

    decoding = residents[:running]
    done = random.random(running) * decoding["predicted_output_tokens"] * 0.9
    decoding["output_tokens"] = done.astype(np.int32)
    decoding["placeholders"] = int(config.async_scheduling)
    decoding["computed_tokens"] = (
        decoding["prompt_tokens"] + decoding["output_tokens"] - (not config.async_scheduling)
    )
    decoding["blocks"] = -(-decoding["computed_tokens"] // config.block_size)
    decoding["in_flight_tokens"][:, 0] = 1
    decoding["in_flight_emits"][:, 0] = 1
    return residents


def _publish(
    writer: SnapshotWriter,
    config: SchedulerConfig,
    at_s: float,
    residents: NDArray[Any],
    running: int,
) -> None:
    decoding = residents[:running]
    in_flight = np.zeros(1 if running else 0, batch_dtype)
    in_flight["started_s"] = at_s
    in_flight["tokens"] = running
    in_flight["decode_context_tokens"] = decoding["computed_tokens"].sum()
    free_blocks = config.num_blocks - 1 - int(decoding["blocks"].sum())
    writer.publish(at_s, free_blocks, in_flight, residents)


@contextmanager
def _writer(config: SchedulerConfig) -> Iterator[tuple[str, SnapshotWriter]]:
    path = f"/dev/shm/foretoken-bench-{os.getpid()}-{uuid.uuid4().hex}"
    writer = SnapshotWriter(path, config)
    try:
        yield path, writer
    finally:
        writer.close()
