"""The pool in virtual time: engines that do what replay does, a router that foretells it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from app.config import PoolSettings
from app.evaluation.arrivals import Arrival, plain_query, random_tokens
from app.evaluation.virtual_pool import VirtualPool, emulated, scheduler_config, sfs_accuracy
from app.prediction import PriorPredictor
from app.records import DecisionRecord
from app.types import Estimator, ModelSpec, Prediction, Query, TokenIds
from sfs_ext import block_keys
from sfs_ext._core import replay


class Says:
    """Predicts one length for all."""

    def __init__(self, output_tokens: float) -> None:
        self._output_tokens = output_tokens

    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        return [Prediction(0.5, self._output_tokens, "test") for _ in models]


def with_models(pool: PoolSettings, *names: str, replicas: int = 1) -> PoolSettings:
    models = tuple(
        model.model_copy(update={"replicas": replicas})
        for model in pool.models
        if model.name in names
    )
    return pool.model_copy(update={"models": models})


def arrival(
    pool: PoolSettings, number: int, at_s: float, prompt: TokenIds, answer: TokenIds
) -> Arrival:
    query = plain_query(pool, number, at_s, prompt)
    return Arrival(query, {model.name: answer for model in pool.models})


def poisson(pool: PoolSettings, rate_qps: float, requests: int) -> list[Arrival]:
    random = np.random.default_rng(3)
    at_s = np.cumsum(random.exponential(1 / rate_qps, requests)).tolist()
    lengths = random.integers(20, 600, (requests, 2)).tolist()
    return [
        arrival(pool, i, at_s[i], random_tokens(random, prompt), random_tokens(random, answer))
        for i, (prompt, answer) in enumerate(lengths)
    ]


def times(records: Iterable[DecisionRecord]) -> list[tuple[str, float | None, float]]:
    return [(r.decision.decision_id, r.ttft_s, r.finished_s) for r in records]


def test_an_engine_in_the_pool_does_what_replay_does(pool: PoolSettings) -> None:
    pool = with_models(pool, "small")
    [model] = pool.models
    arrivals = poisson(pool, rate_qps=15, requests=80)
    records = VirtualPool(pool, Says(100)).run(arrivals)
    scheduler = scheduler_config(model, prefix_caching=True)
    _, token_times = replay(
        scheduler,
        [
            {
                "arrival_s": a.query.arrived_s,
                "rank": rank,
                "prompt_tokens": len(a.query.prompts["qwen3"]),
                "output_tokens": len(a.answers["small"]),
                "max_tokens": model.context_tokens - len(a.query.prompts["qwen3"]),
                "priority": 0,
                "abort_s": math.inf,
                "block_keys": block_keys(
                    np.concatenate([a.query.prompts["qwen3"], a.answers["small"]]),
                    scheduler.block_size,
                ).tolist(),
            }
            for rank, a in enumerate(arrivals)
        ],
        batch_time=emulated(model).batch_time.batch_time(),
        idle_sleep_s=1e-3,
    )
    assert len(records) == len(arrivals)
    for record in records:
        number = int(record.decision.decision_id.removeprefix("dec-"), 16)
        assert record.ttft_s == token_times[number][0] - arrivals[number].query.arrived_s
        assert record.finished_s == token_times[number][-1]
        assert record.output_tokens == len(arrivals[number].answers["small"])
        assert record.finish_reason == "stop"
    assert [r.finished_s for r in records] == sorted(r.finished_s for r in records)


def test_the_truth_never_looks_at_predictions(pool: PoolSettings) -> None:
    pool = with_models(pool, "small")
    arrivals = poisson(pool, rate_qps=15, requests=80)
    low = VirtualPool(pool, Says(1)).run(arrivals)
    high = VirtualPool(pool, Says(2000)).run(arrivals)
    assert times(low) == times(high)
    assert [r.decision.choice.ttft_s for r in low] != [r.decision.choice.ttft_s for r in high]


def test_a_run_can_be_repeated(pool: PoolSettings) -> None:
    pool = with_models(pool, "small", "large", replicas=2)
    arrivals = poisson(pool, rate_qps=60, requests=150)
    first = VirtualPool(pool, PriorPredictor(pool)).run(arrivals)
    again = VirtualPool(pool, PriorPredictor(pool)).run(arrivals)
    assert times(first) == times(again)
    chosen = [record.decision.choice.instance_id for record in first]
    assert chosen == [record.decision.choice.instance_id for record in again]
    assert len(set(chosen)) > 1


def test_a_forecast_is_exact_where_nobody_comes_later(pool: PoolSettings) -> None:
    pool = with_models(pool, "small")
    random = np.random.default_rng(1)
    far_apart = [
        arrival(pool, i, 30.0 * i, random_tokens(random, 700), random_tokens(random, 50))
        for i in range(3)
    ]
    for record in VirtualPool(pool, Says(50)).run(far_apart):
        assert record.decision.choice.estimator == Estimator.SFS
        assert record.decision.choice.ttft_s == pytest.approx(record.ttft_s, abs=1e-9)


def test_what_an_engine_has_cached_is_foretold_with_its_journal_alone(pool: PoolSettings) -> None:
    pool = with_models(pool, "small")
    random = np.random.default_rng(1)
    history = random_tokens(random, 3000)
    turns = [
        arrival(pool, i, 30.0 * i, history[: 1000 * (i + 1)], random_tokens(random, 5))
        for i in range(3)
    ]
    informed = VirtualPool(pool, Says(5)).run(turns)
    uninformed = VirtualPool(pool, Says(5), journaled=False).run(turns)
    assert times(informed) == times(uninformed)
    assert sfs_accuracy(informed).mape < 1e-9
    assert [r.decision.choice.ttft_s > 1.2 * (r.ttft_s or 0) for r in uninformed] == [
        False,
        True,
        True,
    ]


def test_a_follow_up_comes_when_it_says(pool: PoolSettings) -> None:
    pool = with_models(pool, "small")
    random = np.random.default_rng(1)

    def next_turn(record: DecisionRecord) -> Iterable[Arrival]:
        number = int(record.decision.decision_id.removeprefix("dec-"), 16) + 1
        if number < 4:
            yield arrival(pool, number, record.finished_s + 0.25, random_tokens(random, 50), answer)

    answer = random_tokens(random, 7)
    records = VirtualPool(pool, Says(7)).run([arrival(pool, 0, 1.0, answer, answer)], next_turn)
    assert len(records) == 4
    assert records[0].arrived_s == 1.0
    for before, after in itertools.pairwise(records):
        assert after.arrived_s == before.finished_s + 0.25


def test_a_limit_ends_an_answer(pool: PoolSettings) -> None:
    pool = with_models(pool, "small")
    prompt = np.zeros(4000, np.int32)
    [record] = VirtualPool(pool, Says(50)).run([arrival(pool, 0, 0.0, prompt, prompt)])
    # A context of 4,096.
    assert (record.output_tokens, record.finish_reason) == (96, "length")


def test_a_small_kv_pool_limits_the_booking_and_the_engine_alike(pool: PoolSettings) -> None:
    pool = with_models(pool, "small")
    [model] = pool.models
    engine = emulated(model)
    scheduler = engine.scheduler.model_copy(update={"num_blocks": 65})
    # Settings refuse such an emulated engine; one that sizes its own KV cache may be like this.
    small_kv = model.model_copy(
        update={"engine": engine.model_copy(update={"scheduler": scheduler})}
    )
    pool = pool.model_copy(update={"models": (small_kv,)})
    prompt = np.zeros(1000, np.int32)
    [record] = VirtualPool(pool, Says(2000)).run([arrival(pool, 0, 0.0, prompt, prompt)])
    # 64 blocks of 16 tokens.
    assert record.decision.choice.predicted_output_tokens == 24
    assert (record.output_tokens, record.finish_reason) == (24, "length")


def test_only_emulated_engines_run_in_virtual_time(pool_data: dict[str, Any]) -> None:
    pool_data["models"][0]["engine"] = {"kind": "vllm", "model": "some/model", "num_gpus": 1}
    real = PoolSettings.model_validate(pool_data)
    with pytest.raises(ValueError, match="model small: its engine is 'vllm'"):
        VirtualPool(real, PriorPredictor(real))
