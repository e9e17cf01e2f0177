"""The settings' word for every model, whatever the query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from app.config import PoolSettings, PriorSettings
from app.types import ModelSpec, Prediction, Query

_OUTER = NormalDist().inv_cdf(0.9)


class PriorPredictor:
    def __init__(self, settings: PoolSettings) -> None:
        self._predictions = {model.name: prior(model.prior) for model in settings.models}

    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        return [self._predictions[model.name] for model in models]


def prior(settings: PriorSettings) -> Prediction:
    """Lengths are lognormal, of the mean and the sigma that are given."""
    median = settings.output_tokens * math.exp(-(settings.output_sigma**2) / 2)
    outer = math.exp(settings.output_sigma * _OUTER)
    return Prediction(
        quality=settings.quality,
        output_tokens=settings.output_tokens,
        source="prior",
        output_tokens_low=median / outer,
        output_tokens_high=median * outer,
    )
