"""Running estimates of what the router itself observes, each O(1) to update and to read."""

from __future__ import annotations

import math


class ArrivalRate:
    """Arrivals per second, each arrival's weight decaying exponentially.

    It starts from 0, and is low for the first ``horizon_s`` rather than wild.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._arrivals = 0.0
        self._at_s = 0.0

    def arrived(self, now_s: float) -> None:
        self._arrivals = self._decayed(now_s) + 1.0
        self._at_s = max(self._at_s, now_s)

    def per_s(self, now_s: float) -> float:
        return self._decayed(now_s) / self._horizon_s

    def _decayed(self, now_s: float) -> float:
        return self._arrivals * math.exp(-max(0.0, now_s - self._at_s) / self._horizon_s)


class RunningMean:
    """Exponentially weighted; the first value is taken whole, and 0 stands before it."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._mean: float | None = None

    @property
    def value(self) -> float:
        return 0.0 if self._mean is None else self._mean

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            raise ValueError(f"a mean of {value} would never recover: finite values only")
        self._mean = (
            value if self._mean is None else self._mean + self._weight * (value - self._mean)
        )
