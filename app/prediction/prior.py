"""The settings' word for every model, whatever the query."""

from __future__ import annotations

from collections.abc import Sequence

from app.config import PoolSettings
from app.types import ModelSpec, Prediction, Query


class PriorPredictor:
    def __init__(self, settings: PoolSettings) -> None:
        self._predictions = {
            model.name: Prediction(model.prior.quality, model.prior.output_tokens, source="prior")
            for model in settings.models
        }

    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        return [self._predictions[model.name] for model in models]
