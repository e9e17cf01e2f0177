"""What was learnt, and what it says of every model for a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.prediction.forest import Trees
from app.prediction.projection import Projection
from app.prediction.quality import QualityCalibration
from app.types import PromptFeatures
from sfs_ext import Ensemble

QUANTILES: Final = (0.1, 0.5, 0.9)
MODEL_COLUMNS: Final = ("model", "log_parameters", "context_tokens")
"""Behind what a row says of the prompt; the first is a category."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What is known of a model before anybody asks it."""

    name: str
    parameters_billions: float | None
    context_tokens: int

    @property
    def columns(self) -> tuple[float, float]:
        billions = self.parameters_billions
        return np.nan if billions is None else float(np.log(billions)), float(self.context_tokens)


class Length(NamedTuple):
    """Output tokens, at least 1: their mean and QUANTILES, which never cross."""

    mean: float
    low: float
    median: float
    high: float


class Said(NamedTuple):
    """Of one prompt, by model; None for what was not learnt."""

    quality: list[float] | None
    lengths: list[Length] | None


@dataclass(frozen=True)
class Learned:
    projection: Projection
    cards: tuple[ModelCard, ...]
    """Of the models that examples were seen of; the place of each is its category."""
    trees: Trees
    """Outputs: quality where there is a calibration; then the mean and QUANTILES of length where
    there are factors."""
    calibration: QualityCalibration | None
    """None where no example had a score."""
    length_factors: tuple[float, ...]
    """What makes the mean and each quantile true for prompts that were not seen; empty where no
    example had a length."""

    @property
    def model_columns(self) -> NDArray[np.float64]:
        """(models, MODEL_COLUMNS)"""
        return np.array([(i, *card.columns) for i, card in enumerate(self.cards)], np.float64)

    @cached_property
    def ensemble(self) -> Ensemble:
        """ValueError where the parts do not fit together."""
        return Ensemble(
            projection=self.projection.core,
            forest=self.trees.forest(self.projection.width + len(MODEL_COLUMNS)),
            model_columns=self.model_columns,
            calibration=None if self.calibration is None else self.calibration.core,
            length_factors=self.length_factors,
        )

    def predict(self, prompt: PromptFeatures) -> Said:
        said = self.ensemble.predict(prompt.buckets, prompt.description).tolist()
        quality = None if self.calibration is None else [one[0] for one in said]
        if not self.length_factors:
            return Said(quality, None)
        return Said(quality, [Length(*one[-len(Length._fields) :]) for one in said])
