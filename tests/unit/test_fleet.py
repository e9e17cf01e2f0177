"""The fleet under contradiction, bookings and time: what a decision rests on holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sfs_ext import (
    BatchTime,
    Fleet,
    ForecastStatus,
    SchedulerConfig,
    SnapshotWriter,
    batch_dtype,
    query_dtype,
    resident_dtype,
)

CONFIG = SchedulerConfig(
    max_num_batched_tokens=512,
    max_num_seqs=8,
    block_size=16,
    num_blocks=501,
    max_model_len=4096,
)
BATCH_TIME = BatchTime(4e-3, 1e-5, 1e-8, 1e-10)
NOW_S = 1_000_000.0
IDLE = np.zeros(0, batch_dtype)


def waiting(*prompt_tokens: int) -> NDArray[Any]:
    residents = np.zeros(len(prompt_tokens), resident_dtype)
    residents["id"] = np.arange(1, len(residents) + 1)
    residents["arrival_s"] = NOW_S - 1
    residents["prompt_tokens"] = prompt_tokens
    residents["max_tokens"] = 50
    residents["predicted_output_tokens"] = 20
    residents["status"] = 1
    return residents


def ask(*instances: int, arrival_s: float = NOW_S) -> NDArray[Any]:
    queries = np.zeros(len(instances), query_dtype)
    queries["instance"] = instances
    queries["prompt_tokens"] = 100
    queries["max_tokens"] = 50
    queries["arrival_s"] = arrival_s
    return queries


@pytest.mark.parametrize("sigma", [-0.1, math.nan, math.inf])
def test_a_sigma_that_is_none_is_refused(sigma: float) -> None:
    fleet = Fleet()
    with pytest.raises(ValueError, match="length_sigma must be finite and >= 0"):
        fleet.add(CONFIG, BATCH_TIME, sigma)
    fleet.add(CONFIG, BATCH_TIME)
    with pytest.raises(ValueError, match="length_sigma must be finite and >= 0"):
        fleet.set_length_sigma(0, sigma)
    with pytest.raises(IndexError):
        fleet.set_length_sigma(1, 0.5)


def test_one_engines_contradiction_leaves_the_others_alone(tmp_path: Path) -> None:
    fleet = Fleet()
    writers = []
    for name in ("sound", "contradictory"):
        number = fleet.add(CONFIG, BATCH_TIME)
        writers.append(SnapshotWriter(str(tmp_path / name), CONFIG))
        writers[-1].publish(NOW_S, 500, IDLE, waiting(64))
        fleet.attach(number, str(tmp_path / name))
    fleet.forecast(NOW_S, ask(0, 1))
    broken = waiting(64)
    broken["placeholders"] = 3
    writers[1].publish(NOW_S + 0.5, 500, IDLE, broken)
    sound, stale = fleet.forecast(NOW_S + 0.5, ask(0, 1, arrival_s=NOW_S + 0.5))
    assert sound["status"] == stale["status"] == ForecastStatus.OK
    # What cannot be believed is not: the last sound one ages.
    assert stale["age_s"] == pytest.approx(0.5)


def test_what_can_never_run_cannot_be_booked() -> None:
    fleet = Fleet()
    fleet.add(CONFIG, BATCH_TIME)
    for prompt_tokens, max_tokens in [(0, 10), (-1, 10), (4096, 10), (100, 0)]:
        with pytest.raises(ValueError, match="can never run"):
            fleet.book(0, 7, NOW_S, prompt_tokens, 10.0, max_tokens)


def test_unknown_instances_are_named() -> None:
    fleet = Fleet()
    with pytest.raises(IndexError, match="no instance 3"):
        fleet.forecast(NOW_S, ask(3))
    fleet.add(CONFIG, BATCH_TIME)
    fleet.remove(0)
    with pytest.raises(IndexError, match="no instance 0"):
        fleet.book(0, 7, NOW_S, 10, 10.0, 10)


def test_a_prompt_too_long_for_the_engine_is_never_served() -> None:
    fleet = Fleet()
    fleet.add(CONFIG, BATCH_TIME)
    queries = ask(0)
    queries["prompt_tokens"] = 4096
    [forecast] = fleet.forecast(NOW_S, queries)
    assert forecast["status"] == ForecastStatus.NEVER
    assert math.isinf(forecast["ttft_s"])


prompts = st.lists(st.integers(1, 2000), max_size=20)


def forecast_behind(folder: Path, residents: NDArray[Any], now_s: float = NOW_S) -> Any:
    """Of a query behind ``residents``, all times shifted with ``now_s``."""
    residents["arrival_s"] += now_s - NOW_S
    path = str(folder / "snapshot")
    writer = SnapshotWriter(path, CONFIG)
    writer.publish(now_s, 500, IDLE, residents)
    fleet = Fleet()
    fleet.add(CONFIG, BATCH_TIME)
    fleet.attach(0, path)
    writer.close()
    [forecast] = fleet.forecast(now_s, ask(0, arrival_s=now_s))
    return forecast


@given(ahead=prompts, more=st.integers(1, 2000))
def test_work_ahead_never_makes_the_first_token_earlier(
    tmp_path_factory: pytest.TempPathFactory, ahead: list[int], more: int
) -> None:
    folder = tmp_path_factory.mktemp("ahead")
    before = forecast_behind(folder, waiting(*ahead))
    after = forecast_behind(folder, waiting(*ahead, more))
    assert after["ttft_s"] >= before["ttft_s"] - 1e-12


@given(ahead=prompts, shift_s=st.floats(-1e5, 1e6))
def test_a_shift_of_the_clock_shifts_nothing(
    tmp_path_factory: pytest.TempPathFactory, ahead: list[int], shift_s: float
) -> None:
    folder = tmp_path_factory.mktemp("shift")
    there = forecast_behind(folder, waiting(*ahead))
    then = forecast_behind(folder, waiting(*ahead), NOW_S + shift_s)
    assert then["ttft_s"] == pytest.approx(there["ttft_s"], rel=1e-9, abs=1e-9)


@given(ahead=prompts, booked=prompts)
def test_unbooking_restores_what_booking_changed(
    tmp_path_factory: pytest.TempPathFactory, ahead: list[int], booked: list[int]
) -> None:
    path = str(tmp_path_factory.mktemp("book") / "snapshot")
    writer = SnapshotWriter(path, CONFIG)
    writer.publish(NOW_S, 500, IDLE, waiting(*ahead))
    fleet = Fleet()
    fleet.add(CONFIG, BATCH_TIME)
    fleet.attach(0, path)
    writer.close()
    before = fleet.forecast(NOW_S, ask(0))
    for key, prompt_tokens in enumerate(booked, start=1000):
        fleet.book(0, key, NOW_S, prompt_tokens, 20.0, 50)
    during = fleet.forecast(NOW_S, ask(0))
    assert during["booked"] == len(booked)
    assert during["queued_prefill_tokens"] == sum(ahead) + sum(booked)
    assert during["ttft_s"] >= before["ttft_s"] - 1e-12
    for key in range(1000, 1000 + len(booked)):
        assert fleet.unbook(0, key)
    assert not fleet.unbook(0, 1000)
    assert fleet.forecast(NOW_S, ask(0)) == before


def test_a_writer_that_cannot_be_made_leaves_no_file(tmp_path: Path) -> None:
    huge = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=4, block_size=8, num_blocks=2**24 + 1,
        max_model_len=256,
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(ValueError, match="16777217 blocks"):
            SnapshotWriter(str(tmp_path / "snapshot"), huge, kv_journaled=True)
    assert list(tmp_path.iterdir()) == []
