"""From examples to a predictor's file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import lightgbm

from app.config import TokenizerSettings
from app.prediction.artifact import FORMAT_VERSION, Artifact, Card, StoredForest, encoded
from app.prediction.examples import Example, digest
from app.prediction.features import FEATURE_VERSION
from app.prediction.fitting import Fitted, fit
from app.prediction.learned import ModelCard
from app.prediction.validation import FOLDS, cross_validate, learned, validate


def train(
    examples: Sequence[Example],
    cards: Sequence[ModelCard],
    tokenizer: TokenizerSettings,
    clock: Callable[[], float] = time.time,
) -> Artifact:
    """``tokenizer``: whose ids the examples' features are of. ValueError without examples, or for
    examples of models that ``cards`` does not name."""
    fitted = fit(examples, cards)
    learnt = fitted.learned
    prompts = len({example.prompt_id for example in examples})
    lengths = Counter(e.model for e in examples if e.output_tokens is not None)
    scores = Counter(e.model for e in examples if e.quality is not None)
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
            for card in learnt.cards
        ),
        pca_mean=encoded(learnt.projection.mean),
        pca_components=encoded(learnt.projection.components),
        forest=StoredForest.of(learnt.trees),
        quality_calibration=learnt.calibration,
        length_factors=learnt.length_factors,
        gain_shares=_gain_shares(fitted),
        validation=(
            None
            if prompts < FOLDS
            else validate(cross_validate(examples, cards, learned()), learnt.cards)
        ),
    )


def _gain_shares(fitted: Fitted) -> dict[str, dict[str, float]]:
    boosters = {} if fitted.quality is None else {"quality": fitted.quality}
    if fitted.lengths:
        boosters["output length"] = fitted.lengths[0]
    return {name: _gain_shares_of(booster) for name, booster in boosters.items()}


def _gain_shares_of(booster: lightgbm.Booster) -> dict[str, float]:
    gains = booster.feature_importance("gain")
    shares = gains / max(gains.sum(), 1e-12)
    return dict(zip(booster.feature_name(), shares.tolist(), strict=True))
