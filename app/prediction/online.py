"""The predictor of a running router: replaceable, and corrected by what has finished."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from app.prediction.predictor import Predictor
from app.prediction.residuals import Drift, LengthResiduals
from app.types import Forecast, ModelSpec, Prediction, Query

logger = logging.getLogger(__name__)


class OnlinePredictor:
    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._residuals: defaultdict[str, LengthResiduals] = defaultdict(LengthResiduals)
        self._alarming: set[str] = set()
        self._version = 0

    @property
    def version(self) -> int:
        """Another one for each predictor."""
        return self._version

    def replace(self, predictor: Predictor) -> None:
        """What was seen of the one before says nothing of this one."""
        self._predictor = predictor
        self._residuals = defaultdict(LengthResiduals)
        self._alarming.clear()
        self._version += 1

    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        said = self._predictor.predict(query, models)
        return [
            _corrected(one, self._residuals[model.name].correction)
            for model, one in zip(models, said, strict=True)
        ]

    def finished(self, forecast: Forecast, output_tokens: int, version: int) -> None:
        """The request for which this was promised, by the predictor of that version, has ended as
        its engine saw fit."""
        if version != self._version:
            return
        residuals = self._residuals[forecast.model]
        residuals.observe(forecast, output_tokens)
        drift, was_alarming = residuals.drift, forecast.model in self._alarming
        if not drift.alarming(was_alarming):
            self._alarming.discard(forecast.model)
        elif not was_alarming:
            self._alarming.add(forecast.model)
            logger.warning(
                "predicted lengths of %s have drifted: its newest %d answers are %+.0f%% longer, "
                "and %.0f%% of them lie where 80%% should; train again",
                *(forecast.model, drift.requests, 100 * drift.bias, 100 * drift.coverage),
            )

    def length_sigma(self, model: str, prior: float) -> float:
        """Standard deviation of the log of observed over predicted lengths."""
        return self._residuals[model].sigma(prior)

    def drift_of(self, model: str) -> Drift:
        return self._residuals[model].drift


def _corrected(said: Prediction, factor: float) -> Prediction:
    return Prediction(
        quality=said.quality,
        output_tokens=said.output_tokens * factor,
        source=said.source,
        output_tokens_low=said.output_tokens_low * factor,
        output_tokens_high=said.output_tokens_high * factor,
        length_correction=said.length_correction * factor,
    )
