"""How predicted lengths compare with those of requests that have finished."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from app.types import Forecast

WINDOW = 500
"""Finished requests of a model that are looked back on."""
PRIOR_REQUESTS = 20
"""As many weigh as much as the belief that predictions are right on average and stray as far as
the settings' prior says."""
DRIFT_REQUESTS = 100
"""From here on a bias or a coverage is no accident."""
LARGEST_BIAS = 0.25
SMALLEST_COVERAGE = 0.6
"""Of an interval that should hold 0.8."""
SLACK = 0.05


@dataclass(frozen=True, slots=True)
class Drift:
    requests: int
    bias: float
    """How much longer answers were than predicted before any correction, as a share; nan without
    requests."""
    coverage: float
    """Share of the answers within the interval that was promised; nan without requests."""

    def alarming(self, already: bool) -> bool:
        """An alarm that is on takes clearly better figures to end, or it would flicker."""
        slack = SLACK if already else 0.0
        return self.requests >= DRIFT_REQUESTS and (
            abs(self.bias) > LARGEST_BIAS - slack or self.coverage < SMALLEST_COVERAGE + slack
        )


class LengthResiduals:
    """Of one model, over its newest requests whose limit left room for the answer."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, bool]] = deque()
        self._predicted = self._observed = 0.0
        self._log, self._log_squared = 0.0, 0.0
        self._inside = 0

    def observe(self, forecast: Forecast, output_tokens: int) -> None:
        # By its limit, never by how it ended: else long answers would be left out.
        if forecast.limits_answer:
            return
        predicted = max(1.0, forecast.predicted_output_tokens / forecast.length_correction)
        low, high = forecast.output_tokens_low, forecast.output_tokens_high
        inside = math.floor(low) <= output_tokens <= high
        self._seen.append((predicted, output_tokens, inside))
        self._count(predicted, output_tokens, inside, 1)
        if len(self._seen) > WINDOW:
            self._count(*self._seen.popleft(), -1)

    def _count(self, predicted: float, observed: int, inside: bool, times: int) -> None:
        self._predicted += times * predicted
        self._observed += times * observed
        self._inside += times * inside
        log = math.log(max(1, observed) / predicted)
        self._log += times * log
        self._log_squared += times * log * log

    @property
    def correction(self) -> float:
        """What predictions are to be multiplied by."""
        if not self._seen:
            return 1.0
        believed = PRIOR_REQUESTS * self._predicted / len(self._seen)
        return (self._observed + believed) / (self._predicted + believed)

    def sigma(self, prior: float) -> float:
        """Standard deviation of the log of observed over predicted lengths."""
        requests = len(self._seen)
        varied = self._log_squared - self._log**2 / requests if requests > 0 else 0.0
        believed = PRIOR_REQUESTS * prior**2
        return math.sqrt((max(0.0, varied) + believed) / (requests + PRIOR_REQUESTS))

    @property
    def drift(self) -> Drift:
        return Drift(
            requests=len(self._seen),
            bias=self._observed / self._predicted - 1.0 if self._seen else math.nan,
            coverage=self._inside / len(self._seen) if self._seen else math.nan,
        )
