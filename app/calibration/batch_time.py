"""Eq. 9's coefficients from step records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sfs_ext import BatchTime

Floats = NDArray[np.float64]

MIN_STEPS = 16
"""Fewer say too little of four coefficients."""

OUTLIER_SIGMAS = 5.0
OUTLIER_FLOOR = 0.25
"""A relative error up to this is never an outlier, however well the other steps agree."""

MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class BatchTimeFit:
    """The coefficients, eq. 6's two rates, and how far to trust them."""

    batch_time: BatchTime
    prefill_tokens_per_s: float
    """theta_pre: prefill tokens of the batches that hold some, over those batches' time."""
    decode_step_s: float
    """Mean time of a decode-only batch."""
    samples: int
    """Steps the fit rests on."""
    outliers: int
    """Steps left out: first steps of a kind, and hiccups."""
    mape: float
    """Mean absolute relative error over ``samples``; 0.04 is 4%."""


def fit_batch_time(steps: NDArray[Any]) -> BatchTimeFit:
    """Fits ``steps`` (step_dtype, any order) by nonnegative least squares on the relative error.

    A step's time runs from ``started_s``, which is the end of the step before it where the engine
    stayed busy, to ``done_s``: what a forecast adds up, the host's work between steps included.
    Raises ValueError where there are too few steps, or none of a kind that is needed.
    """
    seconds = steps["done_s"] - steps["started_s"]
    if not np.all(np.isfinite(seconds) & (seconds > 0)):
        raise ValueError("steps: done_s must be after started_s in every step")
    terms = _terms(steps)
    kept = np.ones(len(steps), np.bool_)
    coefficients = np.zeros(4)
    for _ in range(MAX_ROUNDS):
        if np.count_nonzero(kept) < MIN_STEPS:
            raise ValueError(
                f"{np.count_nonzero(kept)} usable of {len(steps)} steps: a fit needs {MIN_STEPS}"
            )
        coefficients = _least_relative_squares(terms[kept], seconds[kept])
        agreeing = _agreeing(terms @ coefficients / seconds - 1, kept)
        if np.array_equal(agreeing, kept):
            break
        kept = agreeing

    prefills = kept & (steps["prefill_tokens"] > 0)
    decodes = kept & (steps["prefill_tokens"] == 0)
    if not prefills.any() or not decodes.any():
        raise ValueError(
            f"{np.count_nonzero(prefills)} steps with prefill and {np.count_nonzero(decodes)} of "
            "decode alone: the rates need at least one of each"
        )
    prefill_tokens = float(steps["prefill_tokens"][prefills].sum())
    errors = np.abs(terms[kept] @ coefficients / seconds[kept] - 1)
    b0_s, b1_s, b2_s, b3_s = coefficients.tolist()
    return BatchTimeFit(
        batch_time=BatchTime(b0_s, b1_s, b2_s, b3_s),
        prefill_tokens_per_s=prefill_tokens / float(seconds[prefills].sum()),
        decode_step_s=float(seconds[decodes].mean()),
        samples=int(np.count_nonzero(kept)),
        outliers=int(np.count_nonzero(~kept)),
        mape=float(errors.mean()),
    )


def slowdown(batch_time: BatchTime, steps: NDArray[Any]) -> float:
    """The median of what ``steps`` (step_dtype) took over what ``batch_time`` says; 1 is as fitted.

    Raises ValueError where there are too few steps.
    """
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} steps: a slowdown needs {MIN_STEPS}")
    b = batch_time
    expected_s = _terms(steps) @ np.array([b.b0_s, b.b1_s, b.b2_s, b.b3_s])
    return float(np.median((steps["done_s"] - steps["started_s"]) / expected_s))


def _terms(steps: NDArray[Any]) -> Floats:
    """What each of eq. 9's coefficients multiplies: (steps, 4)."""
    return np.stack(
        (
            np.ones(len(steps)),
            steps["prefill_tokens"] + steps["decode_requests"],
            steps["decode_context_tokens"],
            steps["prefill_attention"],
        ),
        axis=1,
    ).astype(np.float64)


def _least_relative_squares(terms: Floats, seconds: Floats) -> Floats:
    relative = terms / seconds[:, None]
    # The terms differ by nine orders of magnitude: solved as they are, the small would be lost.
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1
    solution, _ = nnls(relative / scale, np.ones(len(seconds)))
    return np.asarray(solution / scale)


def _agreeing(errors: Floats, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which errors are in line with those of the steps kept so far."""
    median = np.median(errors[kept])
    sigma = 1.4826 * np.median(np.abs(errors[kept] - median))
    return np.asarray(np.abs(errors - median) <= max(OUTLIER_SIGMAS * sigma, OUTLIER_FLOOR))
