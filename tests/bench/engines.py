"""Published states of engines under load, to forecast from."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sfs_ext import SchedulerConfig, SnapshotWriter, batch_dtype, resident_dtype

NOW_S = 1_000_000.0


@contextmanager
def published(config: SchedulerConfig, running: int, waiting: int) -> Iterator[str]:
    """Path of a snapshot at NOW_S: prompts of 100 to 1,000 tokens, answers of 2,000 on average."""
    random = np.random.default_rng(0)
    residents = np.zeros(running + waiting, resident_dtype)
    residents["id"] = np.arange(1, len(residents) + 1)
    residents["arrival_s"] = NOW_S - 1
    residents["prompt_tokens"] = random.integers(100, 1000, len(residents))
    residents["max_tokens"] = 16_000
    residents["predicted_output_tokens"] = 2000 * random.lognormal(-0.125, 0.5, len(residents))
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

    in_flight = np.zeros(1 if running else 0, batch_dtype)
    in_flight["started_s"] = NOW_S
    in_flight["tokens"] = running
    in_flight["decode_context_tokens"] = decoding["computed_tokens"].sum()

    path = f"/dev/shm/foretoken-bench-{os.getpid()}-{uuid.uuid4().hex}"
    writer = SnapshotWriter(path, config)
    try:
        free_blocks = config.num_blocks - 1 - int(decoding["blocks"].sum())
        writer.publish(NOW_S, free_blocks, in_flight, residents)
        yield path
    finally:
        writer.close()
