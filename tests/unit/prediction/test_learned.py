"""What boosters make of examples whose rules are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import CARDS, features, planted

from app.prediction.examples import Example
from app.prediction.features import DESCRIPTION, INDICATORS
from app.prediction.fitting import Fitted, Options, fit, folds, learn
from app.prediction.learned import Learned, ModelCard

SEEN, UNSEEN = planted(200, seed=1), planted(200, seed=2)
"""Two draws from the same rules."""


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit(SEEN, CARDS)


@pytest.fixture(scope="module")
def learned(fitted: Fitted) -> Learned:
    return fitted.learned


@pytest.fixture(scope="module")
def noise() -> Learned:
    """Large is better by 0.1; beyond that, scores are noise."""
    random = np.random.default_rng(3)
    scored = [
        replace(e, output_tokens=None, quality=float(np.clip(random.normal(mean, 0.2), 0, 1)))
        for e in SEEN
        for mean in (0.6 if e.model == "large" else 0.5,)
    ]
    return learn(scored, CARDS)


def routed(learned: Learned, examples: Sequence[Example]) -> list[str]:
    """The model of best predicted quality for each prompt."""
    names = [card.name for card in learned.cards]
    choices = []
    for example in examples[:: len(CARDS)]:
        quality = learned.predict(example.prompt).quality
        assert quality is not None
        choices.append(names[int(np.argmax(quality))])
    return choices


class TestPlantedRules:
    def test_prompts_go_to_whom_they_suit(self, learned: Learned) -> None:
        truth = {(e.prompt_id, e.model): e.quality or 0.0 for e in UNSEEN}
        prompts = [e.prompt_id for e in UNSEEN[:: len(CARDS)]]
        singles = [np.mean([truth[p, card.name] for p in prompts]) for card in CARDS]
        pairs = zip(prompts, routed(learned, UNSEEN), strict=True)
        assert np.mean([truth[pair] for pair in pairs]) > max(singles) + 0.1
        suited = ["large" if e.task == "code" else "small" for e in UNSEEN[:: len(CARDS)]]
        right = np.mean(np.array(suited) == np.array(routed(learned, UNSEEN)))
        assert right > 0.9

    def test_what_held_is_believed(self, learned: Learned) -> None:
        assert learned.calibration is not None
        assert learned.calibration.own > 0.7

    def test_lengths_follow_keyword_and_model(self, learned: Learned) -> None:
        means: dict[tuple[str, bool], list[float]] = {}
        for example in UNSEEN:
            lengths = learned.predict(example.prompt).lengths
            assert lengths is not None
            place = [card.name for card in CARDS].index(example.model)
            is_long = bool(example.prompt.description[DESCRIPTION.index("asks_long")])
            means.setdefault((example.model, is_long), []).append(lengths[place].mean)
        said = {kind: float(np.mean(values)) for kind, values in means.items()}
        factor = math.exp(0.4**2 / 2)
        assert said["small", True] == pytest.approx(360 * factor, rel=0.2)
        assert said["large", True] == pytest.approx(540 * factor, rel=0.2)
        assert said["small", False] < said["large", False] < said["small", True] / 2

    def test_quantiles_hold_for_prompts_not_seen(self, learned: Learned) -> None:
        said = [
            (example.output_tokens or 0, lengths[place])
            for example in UNSEEN
            for lengths in (learned.predict(example.prompt).lengths,)
            if lengths is not None
            for place in ([card.name for card in CARDS].index(example.model),)
        ]
        assert len(said) == len(UNSEEN)
        inside = np.mean([at.low <= tokens <= at.high for tokens, at in said])
        assert inside == pytest.approx(0.8, abs=0.07)
        below = [np.mean([tokens <= at[1 + i] for tokens, at in said]) for i in range(3)]
        assert below == pytest.approx([0.1, 0.5, 0.9], abs=0.07)


class TestNoise:
    def test_it_is_not_believed(self, noise: Learned) -> None:
        assert noise.calibration is not None
        assert noise.calibration.common < 0.3 and noise.calibration.own < 0.3

    def test_nobody_is_routed_by_it(self, noise: Learned) -> None:
        """Each prompt sent elsewhere than to the better model costs 0.1."""
        elsewhere = routed(noise, UNSEEN).count("small") / (len(UNSEEN) / len(CARDS))
        assert 0.1 * elsewhere < 0.02

    def test_nothing_is_said_of_lengths(self, noise: Learned) -> None:
        assert noise.predict(SEEN[0].prompt).lengths is None


class TestEnsemble:
    def test_it_says_what_the_boosters_do(self, fitted: Fitted) -> None:
        learned = fitted.learned
        prompts = [e.prompt for e in UNSEEN[: 30 * len(CARDS) : len(CARDS)]] + [features("", 1)]
        assert fitted.quality is not None and learned.calibration is not None
        boosters = (fitted.quality, *fitted.lengths)
        for prompt in prompts:
            prompts_part = np.tile(learned.projection.row(prompt), (len(CARDS), 1))
            rows = np.hstack((prompts_part, learned.model_columns))
            quality, *lengths = np.array([booster.predict(rows) for booster in boosters])
            said = learned.predict(prompt)
            expected = learned.calibration.apply(quality.tolist())
            assert said.quality == pytest.approx(expected, rel=1e-9)
            assert said.lengths is not None
            for place, (mean, *quantiles) in enumerate(np.transpose(lengths).tolist()):
                factors = learned.length_factors
                whole = [
                    max(1.0, mean * factors[0]),
                    *sorted(max(1.0, q * f) for q, f in zip(quantiles, factors[1:], strict=True)),
                ]
                assert list(said.lengths[place]) == pytest.approx(whole, rel=1e-9)

    @settings(max_examples=60)
    @given(st.text(max_size=200), st.lists(st.integers(0, 2**31 - 1), max_size=50))
    def test_quantiles_never_cross_and_nothing_is_shorter_than_a_token(
        self, learned: Learned, text: str, token_ids: list[int]
    ) -> None:
        said = learned.predict(features(text, *token_ids))
        assert said.lengths is not None and said.quality is not None
        assert all(0.0 <= quality <= 1.0 for quality in said.quality)
        for mean, low, median, high in said.lengths:
            assert mean >= 1.0
            assert 1.0 <= low <= median <= high


@pytest.mark.usefixtures("few_trees")
class TestFewExamples:
    def test_one_single_prompt(self) -> None:
        learned = learn(planted(1), CARDS)
        said = learned.predict(features("anything", 9))
        assert said.quality == pytest.approx([e.quality for e in planted(1)])
        assert said.lengths is not None and np.isfinite(said.lengths).all()

    def test_one_single_example(self) -> None:
        one = replace(planted(1)[0], quality=0.7, output_tokens=120)
        said = learn([one], CARDS).predict(features())
        assert said.quality == pytest.approx([0.7])
        assert said.lengths is not None
        assert list(said.lengths[0]) == pytest.approx([120.0] * 4)

    def test_scores_that_are_all_equal(self) -> None:
        learned = learn([replace(e, quality=0.25) for e in planted(40)], CARDS)
        assert learned.predict(features("detailed", 100, 101)).quality == pytest.approx([0.25] * 2)

    @pytest.mark.parametrize("tokens", [0, 1])
    def test_answers_without_length(self, tokens: int) -> None:
        learned = learn([replace(e, output_tokens=tokens) for e in planted(40)], CARDS)
        lengths = learned.predict(features()).lengths
        assert lengths is not None
        assert all(list(length) == pytest.approx([1.0] * 4) for length in lengths)

    def test_only_models_with_examples_are_known(self) -> None:
        examples = [e for e in planted(30) if e.model == "large"]
        learned = learn(examples, CARDS)
        assert [card.name for card in learned.cards] == ["large"]
        said = learned.predict(features())
        assert said.quality is not None and len(said.quality) == 1

    def test_a_model_of_a_single_prompt(self) -> None:
        """All folds but one are learnt of without it."""
        examples = [e for e in planted(40) if e.model == "small" or e.prompt_id == "prompt-7"]
        learned = learn(examples, CARDS)
        said = learned.predict(features())
        assert said.quality is not None and np.isfinite(said.quality).all()
        assert said.lengths is not None and np.isfinite(said.lengths).all()

    def test_scores_and_lengths_may_be_of_other_answers(self) -> None:
        halves = [
            replace(e, quality=None) if i % 2 else replace(e, output_tokens=None)
            for i, e in enumerate(planted(40))
        ]
        said = learn(halves, CARDS).predict(features())
        assert said.quality is not None and said.lengths is not None

    def test_without_scores_nothing_is_said_of_quality(self) -> None:
        learned = learn([replace(e, quality=None) for e in planted(30)], CARDS)
        assert learned.calibration is None
        said = learned.predict(features())
        assert said.quality is None and said.lengths is not None

    def test_order_and_run_do_not_matter(self) -> None:
        examples = planted(30)
        first, second = learn(examples, CARDS), learn(examples, CARDS)
        prompt = planted(1, seed=9)[0].prompt
        assert first.predict(prompt) == second.predict(prompt)


class TestRefused:
    def test_nothing_to_learn_from(self) -> None:
        empty = replace(planted(1)[0], quality=None, output_tokens=None)
        for examples in ([], [empty]):
            with pytest.raises(ValueError, match="no examples"):
                learn(examples, CARDS)

    def test_examples_of_a_model_that_nobody_knows(self) -> None:
        stranger = replace(planted(1)[0], model="stranger")
        with pytest.raises(ValueError, match="without a card: stranger"):
            learn([*planted(3), stranger], CARDS)


@pytest.mark.usefixtures("few_trees")
class TestOptions:
    def test_without_indicators_they_are_not_looked_at(self) -> None:
        for options, used in ((Options(), True), (Options(indicators=False), False)):
            fitted = fit([replace(e, quality=None) for e in planted(40)], CARDS, options)
            learned, booster = fitted.learned, fitted.lengths[0]
            gains = dict(
                zip(booster.feature_name(), booster.feature_importance("gain"), strict=True)
            )
            assert bool(sum(gains[name] for name in INDICATORS) > 0) == used
            # Of one length: only the keyword tells them apart.
            plain, keyword = (learned.predict(features(t)).lengths for t in ("Hello!", "detail"))
            assert (plain != keyword) == used

    def test_components(self) -> None:
        learned = learn(planted(30), CARDS, Options(components=4))
        assert len(learned.projection.components) == 4
        assert learned.projection.row(features()).shape == (4 + len(DESCRIPTION),)
        assert np.isfinite(learned.predict(features()).quality or [np.nan]).all()


class TestCards:
    def test_unknown_sizes_are_not_zero(self) -> None:
        assert math.isnan(ModelCard("x", None, 10).columns[0])
        assert ModelCard("x", 8.0, 10).columns == (pytest.approx(math.log(8.0)), 10.0)


class TestFolds:
    @given(
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["small", "large"]))),
        st.integers(1, 7),
        st.integers(0, 5),
    )
    def test_no_prompt_is_on_both_sides(
        self, answers: list[tuple[int, str]], count: int, seed: int
    ) -> None:
        prompt = features()
        examples = [Example(str(i), m, prompt, "", 1, None) for i, m in answers]
        parts = folds(examples, count, seed)
        assert sorted(i for part in parts for i in part) == list(range(len(examples)))
        prompts = [{examples[i].prompt_id for i in part} for part in parts]
        assert sum(map(len, prompts)) == len({e.prompt_id for e in examples})
        sizes = [len(fold) for fold in prompts]
        assert len(sizes) <= count and all(sizes)
        assert max(sizes, default=0) - min(sizes, default=0) <= 1

    def test_they_do_not_depend_on_order(self) -> None:
        examples = planted(20)
        turned = examples[::-1]
        for one, other in zip(folds(examples, 5, 1), folds(turned, 5, 1), strict=True):
            assert {examples[i].prompt_id for i in one} == {turned[i].prompt_id for i in other}
        assert folds(examples, 5, 1) != folds(examples, 5, 2)
