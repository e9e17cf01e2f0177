"""What one forecast costs, from an idle engine to a saturated one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engines import NOW_S, published
from pytest_benchmark.fixture import BenchmarkFixture

from sfs_ext import BatchTime, Fleet, ForecastStatus, SchedulerConfig, query_dtype

CONFIG = SchedulerConfig(
    max_num_batched_tokens=8192,
    max_num_seqs=256,
    block_size=16,
    num_blocks=60_000,
    max_model_len=40_960,
    async_scheduling=True,
)
BATCH_TIME = BatchTime(5e-3, 2e-6, 4e-8, 3e-10)


@pytest.mark.parametrize(("running", "waiting"), [(0, 0), (32, 0), (256, 128)])
def test_forecast(benchmark: BenchmarkFixture, running: int, waiting: int) -> None:
    queries = np.zeros(1, query_dtype)
    queries["prompt_tokens"] = 500
    queries["predicted_output_tokens"] = 300
    queries["max_tokens"] = 1000
    queries["arrival_s"] = NOW_S + 1e-3
    fleet = Fleet()
    fleet.add(CONFIG, BATCH_TIME)
    with published(CONFIG, running, waiting) as path:
        fleet.attach(0, path)
        [forecast] = benchmark(fleet.forecast, NOW_S + 1e-3, queries)
    assert forecast["status"] == ForecastStatus.OK
    assert math.isfinite(forecast["ttft_s"])
    assert forecast["waiting"] == waiting
