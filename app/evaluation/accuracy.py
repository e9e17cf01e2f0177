"""How near the forecast times to the first token came to the observed ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.records import DecisionRecord
from app.types import Estimator

ALL_MODELS = "all"


@dataclass(frozen=True, slots=True)
class Pair:
    """One estimator's forecast for one request, beside what the ingress observed."""

    model: str
    estimator: str
    predicted_ttft_s: float
    observed_ttft_s: float


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Percentage errors of one estimator for one model, as fractions of the observed TTFT."""

    model: str
    estimator: str
    requests: int
    observed_mean_s: float
    mape: float
    p50: float
    p95: float
    bias: float
    """Mean of (predicted - observed) / observed: positive where the forecast is late."""


def pairs(records: Iterable[DecisionRecord]) -> list[Pair]:
    """The chosen instance's forecast by the estimator in use, and the throughput estimator's
    where it had a snapshot; requests without a first token have nothing to compare."""
    found = []
    for record in records:
        if record.ttft_s is None:
            continue
        choice = record.decision.choice
        found.append(Pair(choice.model, choice.estimator, choice.ttft_s, record.ttft_s))
        if choice.estimator != Estimator.THROUGHPUT and not math.isnan(choice.throughput_ttft_s):
            found.append(
                Pair(choice.model, Estimator.THROUGHPUT, choice.throughput_ttft_s, record.ttft_s)
            )
    return found


def measure(model: str, estimator: str, compared: Sequence[Pair]) -> Accuracy:
    """An infinite forecast stays infinite in the mean; percentiles are not interpolated.

    Raises ValueError for nothing to compare, an observed TTFT that is not positive, or a forecast
    that is nan.
    """
    if not compared:
        raise ValueError(f"no forecast of {estimator} for {model} to measure")
    predicted_s = np.array([p.predicted_ttft_s for p in compared])
    observed_s = np.array([p.observed_ttft_s for p in compared])
    if not np.all(observed_s > 0):
        raise ValueError(f"observed TTFT of {model} must be positive, found {observed_s.min()} s")
    if np.any(np.isnan(predicted_s)):
        raise ValueError(f"a forecast of {estimator} for {model} is nan")
    error = (predicted_s - observed_s) / observed_s
    return Accuracy(
        model=model,
        estimator=estimator,
        requests=len(compared),
        observed_mean_s=float(observed_s.mean()),
        mape=float(np.abs(error).mean()),
        p50=_percentile(np.abs(error), 50),
        p95=_percentile(np.abs(error), 95),
        bias=float(error.mean()),
    )


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent, method="inverted_cdf"))


def by_model(compared: Iterable[Pair]) -> list[Accuracy]:
    """One row for each estimator and model, models by name, then one for each over all models."""
    groups: defaultdict[tuple[bool, str, str], list[Pair]] = defaultdict(list)
    for pair in compared:
        groups[False, pair.model, pair.estimator].append(pair)
        groups[True, ALL_MODELS, pair.estimator].append(pair)
    return [
        measure(model, estimator, groups[last, model, estimator])
        for last, model, estimator in sorted(groups)
    ]


def markdown(rows: Sequence[Accuracy]) -> str:
    lines = [
        "| model | estimator | requests | mean TTFT, ms | MAPE | p50 | p95 | bias |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.model} | {r.estimator} | {r.requests} | {r.observed_mean_s * 1e3:.1f} "
        f"| {_percent(r.mape)} | {_percent(r.p50)} | {_percent(r.p95)} | {r.bias * 100:+.1f}% |"
        for r in rows
    ]
    return "\n".join(lines)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.1f}%" if math.isfinite(fraction) else str(fraction)
