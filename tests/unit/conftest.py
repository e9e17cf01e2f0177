"""A pool of two models, and engines that say what the test has them say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import yaml

from app.config import PoolSettings
from app.identity import new_decision_id, request_key
from app.types import AUTO, Query
from sfs_ext import (
    SchedulerConfig,
    Snapshot,
    SnapshotReader,
    SnapshotWriter,
    batch_dtype,
    resident_dtype,
)

# A loaded machine is slow, not wrong.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")

NOW_S = 1_000_000.0

POOL = """
tokenizers:
  qwen3: {kind: qwen}
models:
  - name: small
    tokenizer: qwen3
    context_tokens: 4096
    price_in_usd_per_mtok: 0.1
    price_out_usd_per_mtok: 0.4
    prior: {quality: 0.4, output_tokens: 200, output_sigma: 0.5, ttft_ms: 40}
    lps: {capacity_qps: 10, parallel_queries: 2}
    engine: &engine
      kind: emulated
      scheduler:
        max_num_batched_tokens: 2048
        max_num_seqs: 64
        block_size: 16
        num_blocks: 1001
        async_scheduling: false
      batch_time: {b0_s: 4.0e-3, b1_s: 1.0e-5, b2_s: 1.0e-8, b3_s: 1.0e-10, host_s: 1.0e-3}
      output_tokens: {mean: 100, sigma: 0.5}
  - name: large
    tokenizer: qwen3
    context_tokens: 8192
    price_in_usd_per_mtok: 0.5
    price_out_usd_per_mtok: 1.0
    prior: {quality: 0.8, output_tokens: 200, output_sigma: 0.5, ttft_ms: 120}
    engine: *engine
"""


@pytest.fixture
def pool_data() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(POOL)
    return data


@pytest.fixture
def pool(pool_data: dict[str, Any]) -> PoolSettings:
    return PoolSettings.model_validate(pool_data)


class Engine:
    """The publishing side of an engine, with waiting prompts only."""

    def __init__(self, path: str, config: SchedulerConfig) -> None:
        self.path = path
        self._writer = SnapshotWriter(path, config)
        self._reader = SnapshotReader(path)

    def publish(
        self,
        at_s: float,
        waiting: tuple[tuple[int, int], ...] = (),
        predicted_output_tokens: float = 0.0,
    ) -> bytes:
        """``waiting``: request keys and prompt tokens. Returns the snapshot's bytes."""
        residents = np.zeros(len(waiting), dtype=resident_dtype)
        for resident, (key, prompt_tokens) in zip(residents, waiting, strict=True):
            resident["id"] = key
            resident["arrival_s"] = at_s
            resident["prompt_tokens"] = prompt_tokens
            resident["max_tokens"] = 100
            resident["predicted_output_tokens"] = predicted_output_tokens
            resident["status"] = 1
        self._writer.publish(at_s, 1000, np.zeros(0, dtype=batch_dtype), residents)
        snapshot = self._reader.read()
        assert isinstance(snapshot, Snapshot)
        return snapshot.to_bytes()

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[SchedulerConfig], Engine]]:
    engines: list[Engine] = []

    def start(config: SchedulerConfig) -> Engine:
        engines.append(Engine(str(tmp_path / f"engine-{len(engines)}"), config))
        return engines[-1]

    yield start
    for started in engines:
        started.close()


@pytest.fixture
def query() -> Callable[..., Query]:
    """A query for any model, without a target, that arrives at NOW_S; changed by keywords."""

    def ask(prompt_tokens: int = 100, **changed: Any) -> Query:
        decision_id = new_decision_id()
        whole = Query(
            decision_id=decision_id,
            request_key=request_key(decision_id),
            model=AUTO,
            prompts={"qwen3": np.zeros(prompt_tokens, dtype=np.int32)},
            text="",
            arrived_s=NOW_S,
            max_tokens=None,
            priority=0,
            ttft_slo_s=math.inf,
            cost_weight=5e-4,
            latency_weight=1.0,
            policy="constrained",
        )
        return replace(whole, **changed)

    return ask
