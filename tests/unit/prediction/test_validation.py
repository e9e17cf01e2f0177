"""What predictors are said to be worth, of predictions that a test makes up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from planted import CARDS, features, planted

from app.prediction.examples import Example
from app.prediction.figures import Validation
from app.prediction.learned import Length, ModelCard, Said
from app.prediction.validation import BINS, Held, cross_validate, validate
from app.types import PromptFeatures


def example(prompt_id: str, model: str = "small", **changed: Any) -> Example:
    whole = Example(prompt_id, model, features(), "", 100, 0.5)
    return replace(whole, **changed)


def held(one: Example, fold: int = 0, **changed: Any) -> Held:
    whole = Held(fold, one, 0.5, Length(100.0, 50.0, 100.0, 200.0), 0.4, 80.0)
    return replace(whole, **changed)


class Memory:
    """Says the same of every prompt, and remembers what it was taught."""

    def __init__(self, said: Callable[[int], Said] | None = None) -> None:
        self.taught: list[Sequence[Example]] = []
        self.asked: list[PromptFeatures] = []
        self._said = said or (lambda models: Said([0.5] * models, [Length(1, 1, 1, 1)] * models))

    def __call__(
        self, examples: Sequence[Example], cards: Sequence[ModelCard]
    ) -> Callable[[PromptFeatures], Said]:
        self.taught.append(examples)

        def predict(prompt: PromptFeatures) -> Said:
            self.asked.append(prompt)
            return self._said(len(cards))

        return predict


class TestCrossValidation:
    def test_every_example_is_held_once_from_those_that_teach(self) -> None:
        examples, memory = planted(23), Memory()
        found = cross_validate(examples, CARDS, memory)
        assert sorted((h.example.prompt_id, h.example.model) for h in found) == sorted(
            (e.prompt_id, e.model) for e in examples
        )
        assert len(memory.taught) == 5
        for fold, taught in enumerate(memory.taught):
            unseen = {h.example.prompt_id for h in found if h.fold == fold}
            assert not unseen & {e.prompt_id for e in taught}
            assert len(unseen) + len({e.prompt_id for e in taught}) == 23
        assert len(memory.asked) == 23

    def test_means_are_of_the_training_prompts(self) -> None:
        examples = [example(str(i), quality=i / 4, output_tokens=i) for i in range(5)]
        for one in cross_validate(examples, CARDS, Memory()):
            rest = [e for e in examples if e.prompt_id != one.example.prompt_id]
            assert one.mean_quality == pytest.approx(sum(e.quality or 0 for e in rest) / 4)
            assert one.mean_tokens == pytest.approx(sum(e.output_tokens or 0 for e in rest) / 4)

    def test_what_no_training_prompt_tells_of_a_model_is_not_held_against_it(self) -> None:
        examples = [example(str(i)) for i in range(5)]
        examples += [example("0", "large"), example("1", "large", quality=None)]
        found = cross_validate(examples, CARDS, Memory())
        [scored] = (h for h in found if h.example.model == "large" and h.example.prompt_id == "0")
        assert math.isnan(scored.quality) and scored.length is not None
        alone = cross_validate(examples[:6], CARDS, Memory())
        assert [h.example.model for h in alone] == ["small"] * 5

    def test_predictions_go_by_card(self) -> None:
        examples = [example(str(i), card.name) for i in range(4) for card in CARDS]
        memory = Memory(lambda models: Said([0.1, 0.9], None))
        for one in cross_validate(examples, CARDS, memory, count=2):
            assert one.quality == (0.1 if one.example.model == "small" else 0.9)
            assert one.length is None

    @pytest.mark.parametrize("prompts", [0, 1])
    def test_it_takes_two_prompts(self, prompts: int) -> None:
        with pytest.raises(ValueError, match="at least 2 prompts"):
            cross_validate(planted(prompts), CARDS, Memory())


class TestFigures:
    def of_two_folds(self) -> Validation:
        return validate(
            [
                # Off by 10 and 30 of lengths where the mean is by 30 and 10; scores by 0.1.
                held(example("a", output_tokens=110, quality=0.6)),
                held(example("b", output_tokens=70, quality=0.4)),
                held(example("c", output_tokens=300, quality=0.5), fold=1, mean_tokens=400.0),
            ],
            CARDS,
        )

    def test_errors_are_means_over_folds(self) -> None:
        validation = self.of_two_folds()
        assert (validation.folds, validation.prompts) == (2, 3)
        [small] = validation.models
        assert (small.model, small.answers) == ("small", 3)
        assert small.length is not None and small.quality is not None
        assert small.length.mae.mean == pytest.approx((20 + 200) / 2)
        assert small.length.mae.spread == pytest.approx(90)
        assert small.length.mae_of_mean.mean == pytest.approx((20 + 100) / 2)
        assert small.length.relative_mae.mean == pytest.approx((1 + 2) / 2)
        assert small.quality.mae.mean == pytest.approx((0.1 + 0) / 2)
        assert small.length.rank_correlation.mean == 0.0

    def test_quantiles(self) -> None:
        [small] = self.of_two_folds().models
        assert [share.mean for share in small.below_quantile] == [0.0, 0.25, 0.5]
        assert small.coverage is not None and small.coverage.mean == 0.5

    def test_rank_correlation(self) -> None:
        said = [held(example(str(i), quality=i / 9), quality=(i / 9) ** 3) for i in range(9)]
        [small] = validate(said, CARDS).models
        assert small.quality is not None
        assert small.quality.rank_correlation.mean == pytest.approx(1.0)

    def test_a_mean_that_errs_nowhere(self) -> None:
        [small] = validate([held(example("a"), mean_quality=0.5)], CARDS).models
        assert small.quality is not None and small.quality.relative_mae.mean == 1.0

    def test_bins_hold_equally_many_in_order(self) -> None:
        said = [held(example(str(i), quality=1 - i / 40), quality=i / 40) for i in range(40)]
        [small] = validate(said[::-1], CARDS).models
        assert [b.answers for b in small.quality_bins] == [4] * BINS
        assert small.quality_bins[0].predicted == pytest.approx(1.5 / 40)
        assert small.quality_bins[0].observed == pytest.approx(1 - 1.5 / 40)

    def test_fewer_answers_than_bins(self) -> None:
        [small] = validate([held(example("a")), held(example("b"))], CARDS).models
        assert [b.answers for b in small.quality_bins] == [1, 1]

    def test_without_scores_and_without_lengths(self) -> None:
        [small] = validate([held(example("a", quality=None), quality=math.nan)], CARDS).models
        assert small.quality is None and small.quality_bins == ()
        [small] = validate([held(example("a", output_tokens=None), length=None)], CARDS).models
        assert small.length is None and small.coverage is None and small.below_quantile == ()

    def test_slices_by_task_and_by_length_in_order(self) -> None:
        def of(tokens: int, task: str = "") -> Held:
            ids = range(1, tokens + 1)
            return held(example(str(tokens), prompt=features("x", *ids), task=task))

        slices = validate([of(200), of(1, "code"), of(31), of(32), of(127)], CARDS).slices
        assert [(s.name, s.answers) for s in slices] == [
            ("code", 1),
            ("no task told", 4),
            ("prompts of 1 to 31 tokens", 2),
            ("prompts of 32 to 63 tokens", 1),
            ("prompts of 64 to 127 tokens", 1),
            ("prompts of 128 to 255 tokens", 1),
        ]
        assert slices[0].length_mae == 0.0 and slices[0].quality_mae == 0.0


class TestRouting:
    def test_each_prompt_goes_to_the_best_predicted(self) -> None:
        found = [
            held(example("a", quality=0.9), quality=0.8, mean_quality=0.5),
            held(example("a", "large", quality=0.3), quality=0.7, mean_quality=0.6),
            held(example("b", quality=0.2), quality=0.1, mean_quality=0.5),
            held(example("b", "large", quality=0.4), quality=0.2, mean_quality=0.6),
            # Of one model alone: there is nothing to choose.
            held(example("c", quality=0.0)),
        ]
        routing = validate(found, CARDS).routing
        assert routing is not None and routing.prompts == 2
        assert routing.routed.mean == pytest.approx((0.9 + 0.4) / 2)
        assert routing.best_single.mean == pytest.approx((0.3 + 0.4) / 2)
        assert routing.random.mean == pytest.approx((0.6 + 0.3) / 2)
        assert routing.oracle.mean == pytest.approx((0.9 + 0.4) / 2)

    def test_nothing_to_choose(self) -> None:
        assert validate([held(example("a"))], CARDS).routing is None
        unscored = [held(example("a", card.name, quality=None)) for card in CARDS]
        assert validate(unscored, CARDS).routing is None
