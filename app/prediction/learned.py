"""Boosters of quality and output length, and what they say of every model for a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import lightgbm
import numpy as np
from numpy.typing import NDArray

from app.prediction.examples import Example
from app.prediction.features import INDICATORS
from app.prediction.forest import forest_of
from app.prediction.projection import COMPONENTS, Projection
from app.prediction.quality import QualityCalibration
from app.types import PromptFeatures
from sfs_ext import Forest

Floats = NDArray[np.float64]

QUANTILES: Final = (0.1, 0.5, 0.9)
INNER_FOLDS = 3

_COMMON: Final[Mapping[str, Any]] = {
    "verbosity": -1,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "min_data_in_leaf": 20,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "feature_fraction": 0.4,
}
_QUALITY: Final = {
    **_COMMON, "objective": "huber", "alpha": 0.9, "num_leaves": 15, "learning_rate": 0.05
}  # fmt: skip
_LENGTH: Final = {**_COMMON, "num_leaves": 8, "learning_rate": 0.05}
QUALITY_TREES = 120
LENGTH_TREES = 150


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


@dataclass(frozen=True, slots=True)
class Options:
    """Departures from the paper's predictors, for ablations."""

    components: int = COMPONENTS
    indicators: bool = True
    seed: int = 1


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
    quality: lightgbm.Booster | None
    """None where no example had a score."""
    calibration: QualityCalibration | None
    lengths: tuple[lightgbm.Booster, ...]
    """Of the mean, then of QUANTILES; empty where no example had a length."""
    length_factors: tuple[float, ...]
    """Of each: what makes it true for prompts that its booster had not seen."""

    @cached_property
    def forests(self) -> list[Forest]:
        boosters = self.lengths if self.quality is None else (self.quality, *self.lengths)
        return [forest_of(booster) for booster in boosters]

    @cached_property
    def _blank(self) -> Floats:
        """(models, columns): a row for each model, but for the prompt's part."""
        own = np.array([(i, *card.columns) for i, card in enumerate(self.cards)], np.float64)
        return np.hstack((np.zeros((len(own), self.projection.width)), own))

    def predict(self, prompt: PromptFeatures) -> Said:
        rows = self._blank.copy()
        rows[:, : self.projection.width] = self.projection.row(prompt)
        said = Forest.evaluate(self.forests, rows)
        quality = None
        if self.calibration is not None:
            quality, said = self.calibration.apply(said[:, 0].tolist()), said[:, 1:]
        if not self.lengths:
            return Said(quality, None)
        return Said(quality, [_length(one, self.length_factors) for one in said.tolist()])


def learn(
    examples: Sequence[Example], cards: Sequence[ModelCard], options: Options | None = None
) -> Learned:
    """ValueError where there is nothing to learn from."""
    options = options or Options()
    scored = [example for example in examples if example.quality is not None]
    measured = [example for example in examples if example.output_tokens is not None]
    if not scored and not measured:
        raise ValueError("no examples to learn from")
    names = {example.model for example in examples}
    known = tuple(card for card in cards if card.name in names)
    if unknown := names - {card.name for card in known}:
        raise ValueError(f"examples of models without a card: {', '.join(sorted(unknown))}")
    prompts = {example.prompt_id: example.prompt for example in examples}
    projection = Projection.fit([*prompts.values()], options.components)
    fit = _Fit(projection, known, options)
    quality = fit.quality(scored) if scored else None
    return Learned(
        projection=projection,
        cards=known,
        quality=quality,
        calibration=fit.calibration(scored) if quality is not None else None,
        lengths=fit.lengths(measured) if measured else (),
        length_factors=fit.length_factors(measured) if measured else (),
    )


def folds(examples: Sequence[Example], count: int, seed: int) -> list[list[int]]:
    """Places of the examples of each fold. All of one prompt are in the same one."""
    prompts = sorted({example.prompt_id for example in examples})
    shuffled = np.random.default_rng(seed).permutation(len(prompts))
    fold_of = {prompts[place]: i % count for i, place in enumerate(shuffled.tolist())}
    parts: list[list[int]] = [[] for _ in range(min(count, len(prompts)))]
    for i, example in enumerate(examples):
        parts[fold_of[example.prompt_id]].append(i)
    return parts


class _Fit:
    def __init__(
        self, projection: Projection, cards: Sequence[ModelCard], options: Options
    ) -> None:
        self._projection = projection
        self._cards = cards
        self._places = {card.name: i for i, card in enumerate(cards)}
        self._options = options
        width = projection.width
        indicators = range(width - len(INDICATORS), width)
        self._ignored = [] if options.indicators else list(indicators)
        self._category = width
        self._projected: dict[str, Floats] = {}

    def quality(self, scored: Sequence[Example]) -> lightgbm.Booster:
        return self._booster(
            scored, [example.quality or 0.0 for example in scored], _QUALITY, QUALITY_TREES
        )

    def lengths(self, measured: Sequence[Example]) -> tuple[lightgbm.Booster, ...]:
        tokens = [float(example.output_tokens or 0) for example in measured]
        objectives: list[dict[str, Any]] = [
            {"objective": "regression"},
            *({"objective": "quantile", "alpha": q} for q in QUANTILES),
        ]
        return tuple(
            self._booster(measured, tokens, {**_LENGTH, **objective}, LENGTH_TREES)
            for objective in objectives
        )

    def calibration(self, scored: Sequence[Example]) -> QualityCalibration:
        """From what boosters say of prompts that they have not seen."""
        (unseen,) = self._unseen(scored, lambda seen: (self.quality(seen),))
        return QualityCalibration.fit(
            [example.prompt_id for example in scored],
            np.array([self._places[example.model] for example in scored]),
            np.array([example.quality for example in scored], np.float64),
            unseen,
            len(self._cards),
        )

    def length_factors(self, measured: Sequence[Example]) -> tuple[float, ...]:
        """Trees that have seen a length know it too well: their quantiles lie too close."""
        tokens = np.array([float(example.output_tokens or 0) for example in measured])
        mean, *quantiles = self._unseen(measured, self.lengths)
        return (
            float(tokens.sum() / np.maximum(mean, 1.0).sum()),
            *(
                float(np.quantile(tokens / np.maximum(said, 1.0), share))
                for said, share in zip(quantiles, QUANTILES, strict=True)
            ),
        )

    def _unseen(
        self,
        examples: Sequence[Example],
        fit: Callable[[Sequence[Example]], tuple[lightgbm.Booster, ...]],
    ) -> Floats:
        """(boosters, examples): what each says of the prompts that it was not fitted to. With one
        prompt alone there are none such."""
        parts = folds(examples, INNER_FOLDS, self._options.seed)
        said = []
        for part in parts:
            held = set(part)
            rest = [example for i, example in enumerate(examples) if i not in held]
            rows = self._rows([examples[i] for i in part])
            said.append(np.array([booster.predict(rows) for booster in fit(rest or examples)]))
        order = np.argsort(np.concatenate([np.array(part, np.int64) for part in parts]))
        return np.hstack(said)[:, order]

    def _rows(self, examples: Sequence[Example]) -> Floats:
        for example in examples:
            if example.prompt_id not in self._projected:
                self._projected[example.prompt_id] = self._projection.row(example.prompt)
        columns = [
            (*self._projected[example.prompt_id], place, *self._cards[place].columns)
            for example in examples
            for place in (self._places[example.model],)
        ]
        rows = np.array(columns, np.float64)
        rows[:, self._ignored] = 0.0
        return rows

    def _booster(
        self,
        examples: Sequence[Example],
        targets: Sequence[float],
        parameters: Mapping[str, Any],
        trees: int,
    ) -> lightgbm.Booster:
        data = lightgbm.Dataset(
            self._rows(examples),
            np.array(targets),
            feature_name=[
                *self._projection.names,
                "model",
                "log_parameters",
                "context_tokens",
            ],
            categorical_feature=[self._category],
            free_raw_data=True,
        )
        # Of a single row a bag would hold none, and LightGBM refuses that.
        bagging = {"bagging_freq": 0} if len(examples) == 1 else {}
        return lightgbm.train({**parameters, **bagging, "seed": self._options.seed}, data, trees)


def _length(said: Sequence[float], factors: Sequence[float]) -> Length:
    # Plain numbers: for so few, each call of numpy would cost more than all of this.
    mean, low, median, high = (
        one * factor if one * factor > 1.0 else 1.0
        for one, factor in zip(said, factors, strict=True)
    )
    low, median, high = sorted((low, median, high))
    return Length(mean, low, median, high)
