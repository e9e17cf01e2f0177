"""Corrections of predicted lengths, and their drift."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import decisions
import numpy as np
import pytest

from app.config import PoolSettings
from app.prediction.online import OnlinePredictor
from app.prediction.prior import PriorPredictor
from app.prediction.residuals import (
    DRIFT_REQUESTS,
    LARGEST_BIAS,
    PRIOR_REQUESTS,
    SMALLEST_COVERAGE,
    WINDOW,
    LengthResiduals,
)
from app.types import Forecast, ModelSpec, Prediction, Query


def forecast(tokens: float = 100.0, **changed: Any) -> Forecast:
    promised = decisions.forecast(
        max_tokens=4096,
        predicted_output_tokens=tokens,
        output_tokens_low=tokens / 2,
        output_tokens_high=tokens * 2,
        prediction_source="trained",
    )
    return replace(promised, **changed)


def after(*seen: tuple[Forecast, int]) -> LengthResiduals:
    residuals = LengthResiduals()
    for promised, output_tokens in seen:
        residuals.observe(promised, output_tokens)
    return residuals


class TestCorrection:
    def test_before_anything_has_finished(self) -> None:
        residuals = after()
        assert residuals.correction == 1.0
        assert residuals.drift.requests == 0 and not residuals.drift.alarming(already=False)
        assert math.isnan(residuals.drift.bias) and math.isnan(residuals.drift.coverage)

    def test_as_many_as_the_belief_correct_by_half(self) -> None:
        assert after(*[(forecast(100), 200)] * PRIOR_REQUESTS).correction == pytest.approx(1.5)

    def test_one_request_moves_it_a_little(self) -> None:
        # (200 + 20 * 100) / (100 + 20 * 100)
        assert after((forecast(100), 200)).correction == pytest.approx(2200 / 2100)

    def test_it_is_of_sums_not_of_ratios(self) -> None:
        # Mean prediction 150: (20 + 600 + 20 * 150) / (300 + 20 * 150)
        residuals = after((forecast(100), 20), (forecast(200), 600))
        assert residuals.correction == pytest.approx(3620 / 3300)
        assert residuals.drift.bias == pytest.approx(620 / 300 - 1)

    def test_what_was_corrected_already_counts_as_it_was_before(self) -> None:
        corrected = forecast(150, length_correction=1.5)
        assert after((corrected, 200)).correction == after((forecast(100), 200)).correction

    def test_corrections_settle_where_the_bias_is(self) -> None:
        residuals = LengthResiduals()
        for _ in range(WINDOW):
            factor = residuals.correction
            residuals.observe(forecast(100 * factor, length_correction=factor), 200)
        # (200 + 20 / 500 * 100) / (100 + 20 / 500 * 100)
        assert residuals.correction == pytest.approx(204 * 5 / 520)

    def test_empty_answers(self) -> None:
        residuals = after(*[(forecast(100), 0)] * PRIOR_REQUESTS)
        assert residuals.correction == pytest.approx(0.5)
        assert residuals.drift.bias == -1.0


class TestSigma:
    def test_before_anything_has_finished(self) -> None:
        assert after().sigma(0.6) == pytest.approx(0.6)

    def test_it_is_of_logs_and_of_what_varies(self) -> None:
        doubled, tenfold = (forecast(100), 200), (forecast(100), 1000)
        assert after(doubled, doubled).sigma(0.0) == 0.0
        # Logs of 2 and 10: their squared distances from the mean, over them and the belief.
        squares = 2 * (math.log(5) / 2) ** 2
        assert after(doubled, tenfold).sigma(0.6) == pytest.approx(
            math.sqrt((squares + PRIOR_REQUESTS * 0.36) / (PRIOR_REQUESTS + 2))
        )

    def test_many_outweigh_the_belief_and_the_oldest_are_forgotten(self) -> None:
        random = np.random.default_rng(1)
        wild = [(forecast(100), 1)] * 10
        lengths = np.ceil(1000 * random.lognormal(0.0, 0.9, WINDOW))
        residuals = after(*wild, *[(forecast(500), int(length)) for length in lengths])
        squares = WINDOW * np.log(lengths / 500).var() + PRIOR_REQUESTS * 0.3**2
        assert residuals.sigma(0.3) == pytest.approx(math.sqrt(squares / (WINDOW + PRIOR_REQUESTS)))

    def test_nothing_said_at_all_counts_as_one_token(self) -> None:
        assert after((forecast(100), 0), (forecast(100), 100)).sigma(0.0) == pytest.approx(
            math.sqrt(2 * (math.log(100) / 2) ** 2 / (PRIOR_REQUESTS + 2))
        )


class TestLimits:
    def test_a_request_counts_where_its_limit_leaves_room_for_a_long_answer(self) -> None:
        assert after((forecast(100, max_tokens=201), 201)).drift.requests == 1
        cut = forecast(100, max_tokens=200)
        assert after((cut, 200)).drift.requests == 0
        assert after((cut, 10)).drift.requests == 0  # however it ended

    def test_limits_do_not_bias_what_is_right(self) -> None:
        """Lognormal answers, predicted as they are, many of them cut."""
        random = np.random.default_rng(1)
        lengths = 300 * random.lognormal(-(0.6**2) / 2, 0.6, WINDOW)
        right = forecast(300, output_tokens_low=116, output_tokens_high=541)
        residuals = LengthResiduals()
        for limit, length in zip([16, 300, 400, 4096] * (WINDOW // 4), lengths, strict=True):
            promised = replace(
                right,
                max_tokens=limit,
                predicted_output_tokens=min(300, limit),
                output_tokens_low=min(116, limit),
                output_tokens_high=min(541, limit),
            )
            residuals.observe(promised, min(limit, int(length)))
        assert residuals.drift.requests == WINDOW // 4
        assert residuals.correction == pytest.approx(1.0, abs=0.1)
        assert residuals.drift.coverage == pytest.approx(0.8, abs=0.1)

    def test_one_without_an_interval_does_not_count(self) -> None:
        silent = forecast(100, output_tokens_low=math.nan, output_tokens_high=math.nan)
        assert after((silent, 100)).drift.requests == 0


class TestWindow:
    def test_the_oldest_are_forgotten(self) -> None:
        residuals = after(*[(forecast(100), 1000)] * WINDOW, *[(forecast(100), 100)] * WINDOW)
        assert residuals.correction == pytest.approx(1.0)
        assert residuals.drift.requests == WINDOW
        assert residuals.drift.bias == pytest.approx(0.0)
        assert residuals.drift.coverage == 1.0


class TestCoverage:
    def test_both_ends_count_as_inside(self) -> None:
        promised = forecast(100, output_tokens_low=49.7, output_tokens_high=200.0)
        inside = [after((promised, tokens)).drift.coverage for tokens in (48, 49, 50, 200, 201)]
        assert inside == [0, 1, 1, 1, 0]


class TestAlarm:
    def test_a_bias(self) -> None:
        tokens = math.ceil(100 * (1 + LARGEST_BIAS)) + 1
        assert not after(*[(forecast(100), tokens)] * (DRIFT_REQUESTS - 1)).drift.alarming(
            already=False
        )
        assert after(*[(forecast(100), tokens)] * DRIFT_REQUESTS).drift.alarming(already=False)
        assert not after(*[(forecast(100), 100)] * DRIFT_REQUESTS).drift.alarming(already=False)

    def test_an_interval_that_does_not_hold(self) -> None:
        outside = DRIFT_REQUESTS - math.ceil(SMALLEST_COVERAGE * DRIFT_REQUESTS)
        narrow = forecast(100, output_tokens_low=99.0, output_tokens_high=101.0)

        def missing(count: int) -> LengthResiduals:
            hits = [(narrow, 100)] * (DRIFT_REQUESTS - count)
            return after(*hits, *[(narrow, 90), (narrow, 110)] * (count // 2))

        assert not missing(outside).drift.alarming(already=False)
        assert missing(outside + 2).drift.alarming(already=False)

    def test_it_takes_clearly_better_figures_to_end(self) -> None:
        drift = after(*[(forecast(100), 122)] * DRIFT_REQUESTS).drift
        assert drift.alarming(already=True) and not drift.alarming(already=False)


class Fixed:
    """Says 100 tokens, between 50 and 200, of every model."""

    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        return [Prediction(0.5, 100.0, "trained", 50.0, 200.0) for _ in models]


def serve(
    online: OnlinePredictor, query: Query, model: ModelSpec, output_tokens: int, times: int = 1
) -> None:
    for _ in range(times):
        [said] = online.predict(query, [model])
        promised = forecast(
            said.output_tokens,
            model=model.name,
            output_tokens_low=said.output_tokens_low,
            output_tokens_high=said.output_tokens_high,
            length_correction=said.length_correction,
        )
        online.finished(promised, output_tokens, online.version)


class TestOnline:
    def test_all_lengths_of_that_model_are_corrected_and_nothing_else(
        self, pool: PoolSettings, query: Callable[..., Query]
    ) -> None:
        small, large = (model.spec() for model in pool.models)
        online = OnlinePredictor(Fixed())
        assert online.predict(query(), [small, large]) == Fixed().predict(query(), [small, large])
        serve(online, query(), small, 200)
        corrected, other = online.predict(query(), [small, large])
        factor = 2200 / 2100
        assert corrected.quality == 0.5 and corrected.source == "trained"
        assert corrected.length_correction == pytest.approx(factor)
        assert corrected.output_tokens == pytest.approx(100 * factor)
        assert corrected.output_tokens_low == pytest.approx(50 * factor)
        assert corrected.output_tokens_high == pytest.approx(200 * factor)
        assert other == Prediction(0.5, 100.0, "trained", 50.0, 200.0)

    def test_a_drift_is_told_when_it_begins(
        self, pool: PoolSettings, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
    ) -> None:
        small, large = (model.spec() for model in pool.models)
        online = OnlinePredictor(Fixed())
        with caplog.at_level(logging.WARNING):
            serve(online, query(), small, 150, times=DRIFT_REQUESTS - 1)
            serve(online, query(), large, 100, times=DRIFT_REQUESTS + 1)
            assert caplog.messages == []
            serve(online, query(), small, 150, times=50)
            [told] = caplog.messages
        assert "small" in told and "100 answers are +50% longer" in told and "100%" in told
        assert online.drift_of("small").alarming(already=False) and not online.drift_of(
            "large"
        ).alarming(already=False)

    def test_one_that_comes_back_is_told_again(
        self, pool: PoolSettings, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
    ) -> None:
        small = pool.models[0].spec()
        online = OnlinePredictor(Fixed())
        serve(online, query(), small, 150, times=DRIFT_REQUESTS)
        serve(online, query(), small, 100, times=WINDOW)
        assert not online.drift_of("small").alarming(already=False)
        serve(online, query(), small, 190, times=WINDOW)
        assert len(caplog.messages) == 2

    def test_one_that_hovers_at_the_edge_is_told_seldom(
        self, pool: PoolSettings, query: Callable[..., Query], caplog: pytest.LogCaptureFixture
    ) -> None:
        small = pool.models[0].spec()
        online, random = OnlinePredictor(Fixed()), np.random.default_rng(1)
        for tokens in random.integers(50, 200, 10_000).tolist():
            serve(online, query(), small, tokens)
        assert 1 <= len(caplog.messages) <= 10

    def test_another_predictor_starts_anew(
        self, pool: PoolSettings, query: Callable[..., Query]
    ) -> None:
        small = pool.models[0].spec()
        online = OnlinePredictor(Fixed())
        serve(online, query(), small, 200, times=30)
        online.replace(PriorPredictor(pool))
        assert online.predict(query(), [small]) == PriorPredictor(pool).predict(query(), [small])
        assert online.drift_of("small").requests == 0

    def test_what_the_one_before_promised_says_nothing_of_it(
        self, pool: PoolSettings, query: Callable[..., Query]
    ) -> None:
        small = pool.models[0].spec()
        online = OnlinePredictor(PriorPredictor(pool))
        before = online.version
        online.replace(Fixed())
        online.finished(forecast(1000), 1, before)
        assert online.drift_of("small").requests == 0
        online.finished(forecast(100), 100, online.version)
        assert online.drift_of("small").requests == 1
        assert online.predict(query(), [small])[0].length_correction == 1.0
