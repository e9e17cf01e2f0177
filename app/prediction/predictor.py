"""What is expected of each model's answer before it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.types import ModelSpec, Prediction, Query


class Predictor(Protocol):
    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        """One prediction per model, in order. The router caps lengths by the query's limits."""
        ...
