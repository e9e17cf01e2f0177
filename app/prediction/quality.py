"""How much to believe of what boosters say of quality.

Which model answers best depends on differences between models, and judges' scores hold far more
noise than such differences. What is said of a prompt is therefore taken apart, into what is said of
the prompt, alike for all models, and of one model beside the others; of each so much is believed as
has certainly held for prompts that the boosters had not seen. Where nothing has, every prompt gets
the models' mean scores, and hardly anybody is routed by noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from sfs_ext import QualityCalibration as CoreCalibration

Floats = NDArray[np.float64]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class QualityCalibration(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    mean_score: tuple[float, ...]
    mean_prediction: tuple[float, ...]
    """By model."""
    common: Share
    own: Share
    """How much is believed."""

    @classmethod
    def fit(
        cls,
        prompt_ids: Sequence[str],
        models: NDArray[np.int64],
        scores: Floats,
        predictions: Floats,
        model_count: int,
    ) -> QualityCalibration:
        """Of answers' scores and of what was predicted of them unseen. ``models``: the place of
        each answer's model, below ``model_count``."""
        prompts = np.unique(np.array(prompt_ids), return_inverse=True)[1]
        score = _Parts.of(scores, models, prompts, model_count)
        prediction = _Parts.of(predictions, models, prompts, model_count)
        return cls(
            mean_score=tuple(score.means.tolist()),
            mean_prediction=tuple(prediction.means.tolist()),
            common=_held(prediction.common, score.common, prompts),
            own=_held(prediction.own, score.own, prompts),
        )

    @cached_property
    def core(self) -> CoreCalibration:
        """ValueError for means of unequally many models."""
        return CoreCalibration(self.mean_score, self.mean_prediction, self.common, self.own)

    def apply(self, predictions: Sequence[float]) -> list[float]:
        """Of one prompt, by model, to the same in [0, 1]."""
        return self.core.apply(predictions)


def _held(predicted: Floats, observed: Floats, prompts: NDArray[np.int64]) -> float:
    """The slope of the least-squares line through the origin, less two standard errors (answers
    to one prompt do not count as independent), in [0, 1]: noise would have half its slopes
    believed else."""
    power = float(predicted @ predicted)
    if power <= 0.0:
        return 0.0
    slope = float(predicted @ observed) / power
    pulls = np.bincount(prompts, predicted * (observed - slope * predicted))
    error = float(np.sqrt(pulls @ pulls)) / power
    return min(1.0, max(0.0, slope - 2.0 * error))


@dataclass(frozen=True, slots=True)
class _Parts:
    means: Floats
    """(models,)"""
    common: Floats
    own: Floats
    """(answers,): what is left of each, alike for all answers to its prompt, and the rest."""

    @classmethod
    def of(
        cls, values: Floats, models: NDArray[np.int64], prompts: NDArray[np.int64], count: int
    ) -> _Parts:
        means = _group_means(values, models, count)
        left = values - means[models]
        common = _group_means(left, prompts, int(prompts.max()) + 1)[prompts]
        return cls(means, common, left - common)


def _group_means(values: Floats, groups: NDArray[np.int64], count: int) -> Floats:
    """A group without members has the mean of all: what is said of a model without scores must not
    look like what is said of the prompt."""
    members = np.bincount(groups, minlength=count)
    means = np.bincount(groups, values, count) / np.maximum(members, 1)
    return np.where(members > 0, means, values.mean())
