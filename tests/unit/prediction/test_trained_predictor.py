"""What a pool makes of a trained predictor: what was learnt, as far as there were examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from planted import CARDS, features, planted

from app.config import PoolSettings, QwenTokenizerSettings
from app.prediction.artifact import Artifact, ArtifactError
from app.prediction.prior import prior
from app.prediction.trained import PRIOR_EXAMPLES, TrainedPredictor
from app.prediction.training import train
from app.types import ModelSpec, Query

Ask = Callable[..., Query]


@pytest.fixture
def specs(pool: PoolSettings) -> list[ModelSpec]:
    return [model.spec() for model in pool.models]


def of(artifact: Artifact, **examples: int) -> Artifact:
    """The same, after as many examples of each model."""
    cards = tuple(
        card.model_copy(
            update={
                "length_examples": examples.get("length_examples", card.length_examples),
                "quality_examples": examples.get("quality_examples", card.quality_examples),
            }
        )
        for card in artifact.cards
    )
    return artifact.model_copy(update={"cards": cards})


def test_ten_examples_weigh_as_much_as_the_prior(
    artifact: Artifact, pool: PoolSettings, specs: list[ModelSpec], query: Ask
) -> None:
    assert PRIOR_EXAMPLES == 10
    prompt = features("detailed", 100, 101)
    learnt = artifact.learned().predict(prompt)
    assert learnt.quality is not None and learnt.lengths is not None
    equal = TrainedPredictor(of(artifact, length_examples=10, quality_examples=30), pool)
    for place, said in enumerate(equal.predict(query(features=prompt), specs)):
        expected, length = prior(pool.models[place].prior), learnt.lengths[place]
        assert said.quality == pytest.approx(expected.quality / 4 + learnt.quality[place] * 3 / 4)
        assert [said.output_tokens, said.output_tokens_low, said.output_tokens_high] == (
            pytest.approx(
                [
                    (expected.output_tokens + length.mean) / 2,
                    (expected.output_tokens_low + length.low) / 2,
                    (expected.output_tokens_high + length.high) / 2,
                ]
            )
        )
        assert said.length_correction == 1.0


@pytest.mark.parametrize(
    ("lengths", "scores", "source"),
    [(11, 11, "trained"), (10, 11, "shrunk"), (11, 10, "shrunk"), (1000, 0, "trained")],
)
def test_trained_is_what_examples_outweigh_the_prior_in(
    artifact: Artifact,
    pool: PoolSettings,
    specs: list[ModelSpec],
    query: Ask,
    lengths: int,
    scores: int,
    source: str,
) -> None:
    of_so_many = of(artifact, length_examples=lengths, quality_examples=scores)
    said = TrainedPredictor(of_so_many, pool).predict(query(features=features()), specs)
    assert [one.source for one in said] == [source, source]


def test_many_examples_are_nearly_all_that_counts(
    artifact: Artifact, pool: PoolSettings, specs: list[ModelSpec], query: Ask
) -> None:
    learnt = artifact.learned().predict(features())
    assert learnt.lengths is not None
    many = of(artifact, length_examples=10**9, quality_examples=10**9)
    said = TrainedPredictor(many, pool).predict(query(features=features()), specs)
    assert [one.quality for one in said] == pytest.approx(learnt.quality)
    assert [one.output_tokens for one in said] == pytest.approx([x.mean for x in learnt.lengths])


@pytest.mark.usefixtures("few_trees")
class TestGaps:
    TOKENIZER = QwenTokenizerSettings(kind="qwen")

    def test_a_model_without_examples_has_its_prior(
        self, pool: PoolSettings, specs: list[ModelSpec], query: Ask
    ) -> None:
        small = [e for e in planted(4) if e.model == "small"]
        predictor = TrainedPredictor(train(small, CARDS, self.TOKENIZER), pool)
        said = predictor.predict(query(features=features()), [specs[1], specs[0], specs[1]])
        assert said[0] == said[2] == prior(pool.models[1].prior)
        assert said[1].source == "shrunk"

    def test_a_model_that_is_no_longer_there_changes_nothing(
        self, pool_data: dict[str, Any], query: Ask
    ) -> None:
        del pool_data["models"][0]
        pool = PoolSettings.model_validate(pool_data)
        predictor = TrainedPredictor(train(planted(4), CARDS, self.TOKENIZER), pool)
        [said] = predictor.predict(query(features=features()), [pool.models[0].spec()])
        assert said.source == "shrunk"
        assert said.quality != 0.8

    @pytest.mark.parametrize("blank", ["quality", "output_tokens"])
    def test_what_was_not_learnt_is_the_priors(
        self, pool: PoolSettings, specs: list[ModelSpec], query: Ask, blank: str
    ) -> None:
        nothing: dict[str, Any] = {blank: None}
        examples = [replace(e, **nothing) for e in planted(4)]
        predictor = TrainedPredictor(train(examples, CARDS, self.TOKENIZER), pool)
        asked = query(features=features())
        for said, model in zip(predictor.predict(asked, specs), pool.models, strict=True):
            expected = prior(model.prior)
            assert (said.quality == expected.quality) == (blank == "quality")
            same = said.output_tokens == expected.output_tokens
            assert same == (blank == "output_tokens")
            assert said.source == "shrunk"


def test_where_nobody_made_features_priors_speak(
    artifact: Artifact, pool: PoolSettings, specs: list[ModelSpec], query: Ask
) -> None:
    said = TrainedPredictor(artifact, pool).predict(query(features=None), specs)
    assert said == [prior(model.prior) for model in pool.models]


class TestTokenizers:
    def test_another_one_is_refused(self, artifact: Artifact, pool_data: dict[str, Any]) -> None:
        pool_data["tokenizers"]["qwen3"] = {"kind": "huggingface", "path": "elsewhere"}
        with pytest.raises(ArtifactError, match=r"kind='qwen'.*path='elsewhere'"):
            TrainedPredictor(artifact, PoolSettings.model_validate(pool_data))

    def test_it_must_be_the_one_that_features_are_of(
        self, artifact: Artifact, pool_data: dict[str, Any]
    ) -> None:
        """The router hashes ids of the first: of another they would mean something else."""
        other = {"kind": "huggingface", "path": "elsewhere"}
        pool_data["models"][1]["tokenizer"] = "other"
        pool_data["tokenizers"] = {"other": other, "qwen3": {"kind": "qwen"}}
        with pytest.raises(ArtifactError, match="first tokenizer, other"):
            TrainedPredictor(artifact, PoolSettings.model_validate(pool_data))
        pool_data["tokenizers"] = {"qwen3": {"kind": "qwen"}, "other": other}
        TrainedPredictor(artifact, PoolSettings.model_validate(pool_data))
