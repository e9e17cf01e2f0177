"""Boosters of quality and output length, fitted to examples: the only part that needs LightGBM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import lightgbm
import numpy as np
from numpy.typing import NDArray

from app.prediction.examples import Example
from app.prediction.features import INDICATORS
from app.prediction.forest import Trees
from app.prediction.learned import MODEL_COLUMNS, QUANTILES, Learned, ModelCard
from app.prediction.projection import COMPONENTS, Projection
from app.prediction.quality import QualityCalibration

Floats = NDArray[np.float64]

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
class Options:
    """Departures from the paper's predictors, for ablations."""

    components: int = COMPONENTS
    indicators: bool = True
    seed: int = 1


@dataclass(frozen=True)
class Fitted:
    learned: Learned
    quality: lightgbm.Booster | None
    lengths: tuple[lightgbm.Booster, ...]
    """What ``learned`` has its trees of."""


def learn(
    examples: Sequence[Example], cards: Sequence[ModelCard], options: Options | None = None
) -> Learned:
    """ValueError where there is nothing to learn from."""
    return fit(examples, cards, options).learned


def fit(
    examples: Sequence[Example], cards: Sequence[ModelCard], options: Options | None = None
) -> Fitted:
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
    fitting = _Fitting(projection, known, options)
    quality = fitting.quality(scored) if scored else None
    lengths = fitting.lengths(measured) if measured else ()
    learned = Learned(
        projection=projection,
        cards=known,
        trees=Trees.of(lengths if quality is None else (quality, *lengths)),
        calibration=fitting.calibration(scored) if scored else None,
        length_factors=fitting.length_factors(measured) if measured else (),
    )
    return Fitted(learned, quality, lengths)


def folds(examples: Sequence[Example], count: int, seed: int) -> list[list[int]]:
    """Places of the examples of each fold. All of one prompt are in the same one."""
    prompts = sorted({example.prompt_id for example in examples})
    shuffled = np.random.default_rng(seed).permutation(len(prompts))
    fold_of = {prompts[place]: i % count for i, place in enumerate(shuffled.tolist())}
    parts: list[list[int]] = [[] for _ in range(min(count, len(prompts)))]
    for i, example in enumerate(examples):
        parts[fold_of[example.prompt_id]].append(i)
    return parts


class _Fitting:
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
            feature_name=[*self._projection.names, *MODEL_COLUMNS],
            categorical_feature=[self._category],
            free_raw_data=True,
        )
        # Of a single row a bag would hold none, and LightGBM refuses that.
        bagging = {"bagging_freq": 0} if len(examples) == 1 else {}
        return lightgbm.train({**parameters, **bagging, "seed": self._options.seed}, data, trees)
