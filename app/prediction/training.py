"""From examples to a predictor's file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from app.config import TokenizerSettings
from app.prediction.artifact import FORMAT_VERSION, Artifact, Calibration, Card, encoded
from app.prediction.examples import Example, digest
from app.prediction.features import FEATURE_VERSION
from app.prediction.learned import ModelCard, learn
from app.prediction.validation import FOLDS, cross_validate, learned, validate


def train(
    examples: Sequence[Example],
    cards: Sequence[ModelCard],
    tokenizer: TokenizerSettings,
    clock: Callable[[], float] = time.time,
) -> Artifact:
    """``tokenizer``: whose ids the examples' features are of. ValueError without examples, or for
    examples of models that ``cards`` does not name."""
    fitted = learn(examples, cards)
    prompts = len({example.prompt_id for example in examples})
    lengths = Counter(e.model for e in examples if e.output_tokens is not None)
    scores = Counter(e.model for e in examples if e.quality is not None)
    calibration = fitted.calibration
    return Artifact(
        format_version=FORMAT_VERSION,
        feature_version=FEATURE_VERSION,
        tokenizer=tokenizer,
        trained_s=clock(),
        data_sha256=digest(examples),
        prompts=prompts,
        cards=tuple(
            Card(
                name=card.name,
                parameters_billions=card.parameters_billions,
                context_tokens=card.context_tokens,
                length_examples=lengths[card.name],
                quality_examples=scores[card.name],
            )
            for card in fitted.cards
        ),
        pca_mean=encoded(fitted.projection.mean),
        pca_components=encoded(fitted.projection.components),
        quality_booster=None if fitted.quality is None else fitted.quality.model_to_string(),
        quality_calibration=(None if calibration is None else Calibration(**asdict(calibration))),
        length_boosters=tuple(booster.model_to_string() for booster in fitted.lengths),
        length_factors=fitted.length_factors,
        validation=(
            None
            if prompts < FOLDS
            else validate(cross_validate(examples, cards, learned()), fitted.cards)
        ),
    )
