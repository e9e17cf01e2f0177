"""What one forecast costs, from an idle engine to a saturated one, and what the shortcuts save."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
ASKED_S = NOW_S + 1e-3
IDLE, LIGHT, SATURATED = (0, 0), (32, 0), (256, 128)
"""Requests running and waiting."""


def query() -> np.ndarray:
    queries = np.zeros(1, query_dtype)
    queries["prompt_tokens"] = 500
    queries["predicted_output_tokens"] = 300
    queries["max_tokens"] = 1000
    queries["arrival_s"] = ASKED_S
    return queries


def fleet_of(path: str, plain_stepping: bool = False) -> Fleet:
    fleet = Fleet(plain_stepping=plain_stepping)
    fleet.add(CONFIG, BATCH_TIME)
    fleet.attach(0, path)
    return fleet


@pytest.mark.parametrize(("running", "waiting"), [IDLE, LIGHT, SATURATED])
def test_forecast(benchmark: BenchmarkFixture, running: int, waiting: int) -> None:
    with published(CONFIG, running, waiting) as path:
        fleet = fleet_of(path)
        # As for a snapshot that has just come: nothing is kept from an earlier query.
        [forecast] = benchmark.pedantic(
            fleet.forecast,
            setup=lambda: fleet.calibrate(0, BATCH_TIME) or ((ASKED_S, query()), {}),
            rounds=1 if benchmark.disabled else 300,
        )
    assert forecast["status"] == ForecastStatus.OK
    assert math.isfinite(forecast["ttft_s"])
    assert forecast["waiting"] == waiting


@pytest.mark.parametrize(
    ("load", "name"),
    [(LIGHT, "forecast_vs_plain_light"), (SATURATED, "forecast_vs_plain_saturated")],
)
def test_against_plain_stepping(
    benchmark: BenchmarkFixture, load: tuple[int, int], name: str
) -> None:
    """How many times faster than one visit per running request in every batch."""
    with published(CONFIG, *load) as path:
        grouped, plain = fleet_of(path), fleet_of(path, plain_stepping=True)
        assert forecast_s(grouped) == pytest.approx(forecast_s(plain), rel=1e-9)
        costs = costs_s(
            benchmark,
            lambda: timed(plain, anew=True),
            lambda: timed(grouped, anew=True),
        )
    benchmark.extra_info[name] = costs[0] / costs[1]


def test_a_second_query(benchmark: BenchmarkFixture) -> None:
    """How many times faster than the first against the same snapshot."""
    with published(CONFIG, *SATURATED) as path:
        fleet = fleet_of(path)
        costs = costs_s(
            benchmark, lambda: timed(fleet, anew=True), lambda: timed(fleet, anew=False)
        )
    benchmark.extra_info["forecast_repeat_saturated"] = costs[0] / costs[1]


def test_two_threads(benchmark: BenchmarkFixture) -> None:
    """How many times faster two threads forecast than one after the other does, on one instance."""
    with published(CONFIG, *SATURATED) as path, ThreadPoolExecutor(2) as threads:
        fleet = fleet_of(path)
        queries = np.repeat(query(), 10 if benchmark.disabled else 2000)

        def ask() -> np.ndarray:
            return fleet.forecast(ASKED_S, queries)

        def one_after_the_other() -> float:
            began_s = time.perf_counter()
            ask()
            ask()
            return time.perf_counter() - began_s

        def at_once() -> float:
            began_s = time.perf_counter()
            first, second = threads.submit(ask), threads.submit(ask)
            assert np.array_equal(first.result(), second.result())
            return time.perf_counter() - began_s

        costs = costs_s(benchmark, one_after_the_other, at_once)
    benchmark.extra_info["forecast_two_threads"] = costs[0] / costs[1]


def forecast_s(fleet: Fleet) -> float:
    return float(fleet.forecast(ASKED_S, query())["ttft_s"][0])


def timed(fleet: Fleet, anew: bool) -> float:
    if anew:
        fleet.calibrate(0, BATCH_TIME)
    queries = query()
    began_s = time.perf_counter()
    fleet.forecast(ASKED_S, queries)
    return time.perf_counter() - began_s


def costs_s(benchmark: BenchmarkFixture, *actions: Callable[[], float]) -> list[float]:
    """Medians, taken in turn, so that whatever else the machine does hits all alike."""
    rounds = 3 if benchmark.disabled else 100
    taken = [[action() for action in actions] for _ in range(rounds)]
    benchmark.pedantic(actions[-1])
    return [statistics.median(costs) for costs in zip(*taken, strict=True)]
