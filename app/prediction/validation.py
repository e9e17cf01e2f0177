"""What predictors are worth on prompts that they were not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from app.prediction.examples import Example
from app.prediction.figures import (
    Accuracy,
    Bin,
    Figure,
    ModelFigures,
    RoutingFigures,
    Slice,
    Validation,
)
from app.prediction.fitting import Options, folds, learn
from app.prediction.learned import QUANTILES, Length, ModelCard, Said

Floats = NDArray[np.float64]

FOLDS = 5
BINS = 10
"""Of equally many predictions, in a calibration curve."""

Predict = Callable[[Example], Said]
"""Of the example only the prompt may be looked at."""
Teach = Callable[[Sequence[Example], Sequence[ModelCard]], Predict]


@dataclass(frozen=True, slots=True)
class Held:
    """An example beside what was said of it unseen."""

    fold: int
    example: Example
    quality: float
    """nan where no training prompt has a score of its model."""
    length: Length | None
    """None where no training prompt has a length of its model."""
    mean_quality: float
    mean_tokens: float
    """The training prompts' means of its model; nan without any."""


def learned(options: Options | None = None) -> Teach:
    def teach(examples: Sequence[Example], cards: Sequence[ModelCard]) -> Predict:
        fitted = learn(examples, cards, options)
        return lambda example: fitted.predict(example.prompt)

    return teach


def cross_validate(
    examples: Sequence[Example],
    cards: Sequence[ModelCard],
    teach: Teach,
    count: int = FOLDS,
    seed: int = 1,
) -> list[Held]:
    """ValueError for fewer than two prompts."""
    parts = folds(examples, count, seed)
    if len(parts) < 2:
        raise ValueError("cross-validation needs examples of at least 2 prompts")
    return [
        held for fold in range(len(parts)) for held in _hold(examples, cards, teach, parts, fold)
    ]


def _hold(
    examples: Sequence[Example],
    cards: Sequence[ModelCard],
    teach: Teach,
    parts: Sequence[Sequence[int]],
    fold: int,
) -> Iterator[Held]:
    unseen = [examples[i] for i in parts[fold]]
    seen = [examples[i] for i in sorted(set(range(len(examples))) - set(parts[fold]))]
    names = {example.model for example in seen}
    known = [card for card in cards if card.name in names]
    places = {card.name: i for i, card in enumerate(known)}
    predict = teach(seen, known)
    said = {e.prompt_id: predict(e) for e in {e.prompt_id: e for e in unseen}.values()}
    quality = {n: _mean([e.quality for e in seen if e.model == n]) for n in names}
    tokens = {n: _mean([e.output_tokens for e in seen if e.model == n]) for n in names}
    for example in unseen:
        if (place := places.get(example.model)) is None:
            continue  # seen in this fold alone
        about = said[example.prompt_id]
        qualities = None if math.isnan(quality[example.model]) else about.quality
        lengths = None if math.isnan(tokens[example.model]) else about.lengths
        yield Held(
            fold=fold,
            example=example,
            quality=math.nan if qualities is None else qualities[place],
            length=None if lengths is None else lengths[place],
            mean_quality=quality[example.model],
            mean_tokens=tokens[example.model],
        )


def validate(held: Sequence[Held], cards: Sequence[ModelCard]) -> Validation:
    return Validation(
        folds=len({one.fold for one in held}),
        prompts=len({one.example.prompt_id for one in held}),
        models=tuple(
            _model_figures(card.name, mine)
            for card in cards
            if (mine := [one for one in held if one.example.model == card.name])
        ),
        routing=_routing(held),
        slices=(
            *_slices(sorted(held, key=_task), _task),
            *_slices(sorted(held, key=_prompt_tokens), _prompt_length),
        ),
    )


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _figure(values: Sequence[float]) -> Figure:
    return Figure(mean=float(np.mean(values)), spread=float(np.std(values)))


def _model_figures(name: str, held: Sequence[Held]) -> ModelFigures:
    measured, scored = _measured(held), _scored(held)
    by_fold = [[(_tokens(h), _length(h)) for h in part] for part in _by_fold(measured)]
    shares = [
        [_mean([truth <= said[1 + i] for truth, said in part]) for part in by_fold]
        for i in range(len(QUANTILES))
    ]
    inside = [_mean([said.low <= truth <= said.high for truth, said in part]) for part in by_fold]
    return ModelFigures(
        model=name,
        answers=len(held),
        length=_accuracy(measured, _tokens, lambda h: _length(h).mean, lambda h: h.mean_tokens),
        below_quantile=tuple(_figure(share) for share in shares if share),
        coverage=_figure(inside) if inside else None,
        quality=_accuracy(scored, _score, lambda h: h.quality, lambda h: h.mean_quality),
        quality_bins=_bins(scored),
    )


def _measured(held: Sequence[Held]) -> list[Held]:
    return [h for h in held if h.example.output_tokens is not None and h.length is not None]


def _scored(held: Sequence[Held]) -> list[Held]:
    return [h for h in held if h.example.quality is not None and not math.isnan(h.quality)]


def _length(held: Held) -> Length:
    if held.length is None:
        raise ValueError(f"no length was said of prompt {held.example.prompt_id}")
    return held.length


def _tokens(held: Held) -> float:
    return float(held.example.output_tokens or 0)


def _score(held: Held) -> float:
    return float(held.example.quality or 0.0)


def _by_fold(held: Sequence[Held]) -> list[list[Held]]:
    return [
        part
        for fold in sorted({one.fold for one in held})
        if (part := [one for one in held if one.fold == fold])
    ]


def _accuracy(
    held: Sequence[Held],
    observed: Callable[[Held], float],
    predicted: Callable[[Held], float],
    baseline: Callable[[Held], float],
) -> Accuracy | None:
    if not held:
        return None
    maes, means, ranks = [], [], []
    for part in _by_fold(held):
        truth = np.array([observed(h) for h in part])
        said = np.array([predicted(h) for h in part])
        maes.append(float(np.abs(said - truth).mean()))
        means.append(float(np.abs(np.array([baseline(h) for h in part]) - truth).mean()))
        ranks.append(_spearman(said, truth))
    relative = [mae / mean if mean > 0 else 1.0 for mae, mean in zip(maes, means, strict=True)]
    return Accuracy(
        mae=_figure(maes),
        mae_of_mean=_figure(means),
        relative_mae=_figure(relative),
        rank_correlation=_figure(ranks),
    )


def _spearman(one: Floats, other: Floats) -> float:
    first, second = rankdata(one), rankdata(other)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _bins(scored: Sequence[Held]) -> tuple[Bin, ...]:
    ordered = sorted(scored, key=lambda held: held.quality)
    edges = np.linspace(0, len(ordered), BINS + 1).astype(int).tolist()
    parts = [ordered[begin:end] for begin, end in pairwise(edges) if end > begin]
    return tuple(
        Bin(
            predicted=_mean([h.quality for h in part]),
            observed=_mean([_score(h) for h in part]),
            answers=len(part),
        )
        for part in parts
    )


def _routing(held: Sequence[Held]) -> RoutingFigures | None:
    by_prompt: dict[str, list[Held]] = {}
    for one in _scored(held):
        by_prompt.setdefault(one.example.prompt_id, []).append(one)
    contested = [answers for answers in by_prompt.values() if len(answers) > 1]
    if not contested:
        return None
    by_fold: dict[int, list[list[Held]]] = {}
    for answers in contested:
        by_fold.setdefault(answers[0].fold, []).append(answers)

    def means(score: Callable[[list[Held]], float]) -> list[float]:
        return [_mean([score(answers) for answers in part]) for part in by_fold.values()]

    routed = means(lambda answers: _score(max(answers, key=lambda h: h.quality)))
    single = means(lambda answers: _score(max(answers, key=lambda h: h.mean_quality)))
    return RoutingFigures(
        prompts=len(contested),
        routed=_figure(routed),
        best_single=_figure(single),
        random=_figure(means(lambda answers: _mean([_score(h) for h in answers]))),
        oracle=_figure(means(lambda answers: max(map(_score, answers)))),
        over_best_single=_figure([r - s for r, s in zip(routed, single, strict=True)]),
    )


def _task(held: Held) -> str:
    return held.example.task or "no task told"


def _prompt_tokens(held: Held) -> int:
    return int(held.example.prompt.description[0])


def _prompt_length(held: Held) -> str:
    below = 1 << max(5, _prompt_tokens(held).bit_length())
    return f"prompts of {below // 2 if below > 32 else 1} to {below - 1} tokens"


def _slices(held: Sequence[Held], name_of: Callable[[Held], str]) -> Iterator[Slice]:
    groups: dict[str, list[Held]] = {}
    for one in held:
        groups.setdefault(name_of(one), []).append(one)

    def mae(errors: list[float]) -> float | None:
        return float(np.mean(errors)) if errors else None

    for name, group in groups.items():
        yield Slice(
            name=name,
            answers=len(group),
            length_mae=mae([abs(_length(h).mean - _tokens(h)) for h in _measured(group)]),
            quality_mae=mae([abs(h.quality - _score(h)) for h in _scored(group)]),
        )
