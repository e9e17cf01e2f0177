from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.calibration import fit_batch_time, slowdown
from sfs_ext import BatchTime, step_dtype

TRUTH = BatchTime(2.41e-3, 2.09e-6, 3.83e-8, 2.86e-10)


def busy_steps(count: int, seed: int, noise: float = 0.0) -> NDArray[Any]:
    """Back-to-back steps of random make-up, each as long as TRUTH says, times exp(noise)."""
    random = np.random.default_rng(seed)
    steps = np.zeros(count, step_dtype)
    steps["sequence"] = np.arange(1, count + 1)
    steps["prefill_requests"] = random.integers(0, 3, count)
    mixed = steps["prefill_requests"] > 0
    chunk_tokens = np.exp(random.uniform(np.log(16), np.log(8192), count)).astype(np.int64)
    context = random.integers(0, 8192, count)
    steps["prefill_tokens"] = np.where(mixed, chunk_tokens, 0)
    steps["prefill_attention"] = np.where(
        mixed, chunk_tokens * context + chunk_tokens * (chunk_tokens + 1) // 2, 0
    )
    steps["decode_requests"] = random.integers(1, 256, count)
    steps["decode_context_tokens"] = steps["decode_requests"] * random.integers(16, 4096, count)
    seconds = np.array([truth_s(step) for step in steps]) * np.exp(random.normal(0, noise, count))
    steps["done_s"] = 1.7e9 + np.cumsum(seconds)
    steps["started_s"] = steps["done_s"] - seconds
    steps["scheduled_s"] = steps["started_s"]
    return steps


def truth_s(step: np.void) -> float:
    return TRUTH.seconds(
        int(step["prefill_tokens"] + step["decode_requests"]),
        int(step["decode_context_tokens"]),
        int(step["prefill_attention"]),
    )


def coefficients(batch_time: BatchTime) -> tuple[float, float, float, float]:
    return batch_time.b0_s, batch_time.b1_s, batch_time.b2_s, batch_time.b3_s


def test_exact_steps_give_the_coefficients_back() -> None:
    fit = fit_batch_time(busy_steps(400, seed=1))
    assert coefficients(fit.batch_time) == pytest.approx(coefficients(TRUTH), rel=1e-3)
    assert (fit.samples, fit.outliers) == (400, 0)
    assert fit.mape < 1e-4


def test_noise_is_told_as_the_error_it_makes() -> None:
    fit = fit_batch_time(busy_steps(2000, seed=2, noise=0.05))
    assert coefficients(fit.batch_time) == pytest.approx(coefficients(TRUTH), rel=0.1)
    assert fit.mape == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.15)


def test_hiccups_are_counted_and_left_out() -> None:
    steps = busy_steps(400, seed=3, noise=0.02)
    hiccups = np.random.default_rng(3).choice(400, 40, replace=False)
    steps["done_s"][hiccups] += 1.0
    fit = fit_batch_time(steps)
    assert fit.outliers == 40
    assert coefficients(fit.batch_time) == pytest.approx(coefficients(TRUTH), rel=0.05)


def test_rates_are_those_of_eq_6() -> None:
    steps = busy_steps(100, seed=4)
    fit = fit_batch_time(steps)
    seconds = steps["done_s"] - steps["started_s"]
    mixed = steps["prefill_tokens"] > 0
    assert fit.prefill_tokens_per_s == pytest.approx(
        steps["prefill_tokens"].sum() / seconds[mixed].sum()
    )
    assert fit.decode_step_s == pytest.approx(seconds[~mixed].mean())


def test_a_term_that_never_varies_costs_no_negative_coefficient() -> None:
    steps = busy_steps(200, seed=5, noise=0.1)
    steps["prefill_attention"] = 0
    assert min(coefficients(fit_batch_time(steps).batch_time)) >= 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="a fit needs 16"):
        fit_batch_time(busy_steps(10, seed=6))


def test_steps_without_prefill_are_refused() -> None:
    steps = busy_steps(200, seed=7)
    with pytest.raises(ValueError, match="0 steps with prefill"):
        fit_batch_time(steps[steps["prefill_tokens"] == 0])


def test_a_step_that_ends_before_it_starts_is_refused() -> None:
    steps = busy_steps(100, seed=8)
    steps["done_s"][7] = steps["started_s"][7] - 1
    with pytest.raises(ValueError, match="done_s must be after started_s"):
        fit_batch_time(steps)


def test_slowdown_is_the_machines_not_the_traffics() -> None:
    steps = busy_steps(300, seed=5, noise=0.05)
    assert slowdown(TRUTH, steps) == pytest.approx(1, abs=0.02)
    # Everything takes 1.7 times as long, and nobody decodes any more.
    slow = steps[steps["prefill_tokens"] > 0]
    slow["done_s"] = slow["started_s"] + 1.7 * (slow["done_s"] - slow["started_s"])
    assert slowdown(TRUTH, slow) == pytest.approx(1.7, rel=0.02)


def test_too_few_steps_say_nothing_of_a_slowdown() -> None:
    with pytest.raises(ValueError, match="15 steps: a slowdown needs 16"):
        slowdown(TRUTH, busy_steps(15, seed=6))
