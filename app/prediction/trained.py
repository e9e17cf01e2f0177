"""What was learnt, as far as there were examples to learn it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.config import PoolSettings
from app.prediction.artifact import Artifact, ArtifactError, Card
from app.prediction.learned import Said
from app.prediction.prior import prior
from app.types import ModelSpec, Prediction, Query

PRIOR_EXAMPLES = 10
"""As many examples weigh as much as the settings' prior does."""


@dataclass(frozen=True, slots=True)
class _Model:
    place: int
    length_share: float
    quality_share: float
    """Of what was learnt in what is said; the rest is the prior's."""
    source: str


class TrainedPredictor:
    def __init__(self, artifact: Artifact, settings: PoolSettings) -> None:
        """ArtifactError where the pool's features are of another tokenizer, or an array
        is not sound."""
        name = settings.feature_tokenizer
        if (here := settings.tokenizers[name]) != artifact.tokenizer:
            raise ArtifactError(
                f"trained on token ids of {artifact.tokenizer}; the pool's features are of its "
                f"first tokenizer, {name} ({here}): train it again"
            )
        try:
            self._learned = artifact.learned()
        except ValueError as error:
            raise ArtifactError(str(error)) from error
        self._priors = {model.name: prior(model.prior) for model in settings.models}
        self._models = {card.name: _model(place, card) for place, card in enumerate(artifact.cards)}

    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        if query.features is None:
            return [self._priors[model.name] for model in models]
        said = self._learned.predict(query.features)
        return [self._prediction(model.name, said) for model in models]

    def _prediction(self, name: str, said: Said) -> Prediction:
        expected = self._priors[name]
        if (model := self._models.get(name)) is None:
            return expected
        quality, share = expected.quality, model.quality_share
        if said.quality is not None:
            quality += share * (said.quality[model.place] - quality)
        lengths = (
            expected.output_tokens,
            expected.output_tokens_low,
            expected.output_tokens_high,
        )
        if said.lengths is not None:
            learnt, share = said.lengths[model.place], model.length_share
            lengths = (
                lengths[0] + share * (learnt.mean - lengths[0]),
                lengths[1] + share * (learnt.low - lengths[1]),
                lengths[2] + share * (learnt.high - lengths[2]),
            )
        return Prediction(quality, lengths[0], model.source, lengths[1], lengths[2])


def _model(place: int, card: Card) -> _Model:
    learnt = [count for count in (card.length_examples, card.quality_examples) if count > 0]
    source = "trained" if min(learnt, default=0) > PRIOR_EXAMPLES else "shrunk"
    return _Model(place, _share(card.length_examples), _share(card.quality_examples), source)


def _share(examples: int) -> float:
    return examples / (examples + PRIOR_EXAMPLES)
