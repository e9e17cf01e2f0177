"""What predictors are worth, in figures that a predictor's file keeps."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Figure(_Frozen):
    """Over folds."""

    mean: float
    spread: float
    """Standard deviation."""

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.spread:.2g}"


class Accuracy(_Frozen):
    """Of one model's predictions of one thing."""

    mae: Figure
    mae_of_mean: Figure
    """Of predicting the training prompts' mean."""
    relative_mae: Figure
    """1 in a fold where the mean errs nowhere."""
    rank_correlation: Figure
    """Spearman's; 0 where all predictions of a fold are one."""


class Bin(_Frozen):
    predicted: float
    observed: float
    answers: int


class Slice(_Frozen):
    """Absolute errors of one task, or of one range of prompt lengths."""

    name: str
    answers: int
    length_mae: float | None
    quality_mae: float | None


class ModelFigures(_Frozen):
    model: str
    answers: int
    length: Accuracy | None
    below_quantile: tuple[Figure, ...]
    """Share of lengths at or below each of QUANTILES."""
    coverage: Figure | None
    """Share between the outer quantiles."""
    quality: Accuracy | None
    quality_bins: tuple[Bin, ...]


class RoutingFigures(_Frozen):
    """Mean score where each prompt goes to the model of the best predicted score."""

    prompts: int
    routed: Figure
    best_single: Figure
    """The model that is best on the training prompts."""
    random: Figure
    oracle: Figure
    over_best_single: Figure
    """How much routing gains over it, fold by fold."""


class Validation(_Frozen):
    folds: int
    prompts: int
    models: tuple[ModelFigures, ...]
    routing: RoutingFigures | None
    """None where no prompt has scores of several models."""
    slices: tuple[Slice, ...]
