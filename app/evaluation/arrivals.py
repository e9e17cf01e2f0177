"""What the clients of a pool in virtual time send."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.config import PoolSettings
from app.identity import request_key
from app.types import AUTO, Query, TokenIds


@dataclass(frozen=True, slots=True)
class Arrival:
    """A query, and what each model would answer: nobody but the engine is told."""

    query: Query
    answers: Mapping[str, TokenIds]
    """By model. It ends there by EOS, unless the query's limits end it before."""


def plain_query(settings: PoolSettings, number: int, arrived_s: float, prompt: TokenIds) -> Query:
    """A query for any model under the pool's own routing defaults; its name follows from
    ``number``, so that a run can be repeated."""
    defaults = settings.router
    decision_id = f"dec-{number:024x}"
    return Query(
        decision_id=decision_id,
        request_key=request_key(decision_id),
        model=AUTO,
        prompts=dict.fromkeys(settings.tokenizers, prompt),
        text="",
        arrived_s=arrived_s,
        max_tokens=None,
        priority=0,
        ttft_slo_s=math.inf if defaults.ttft_slo_ms is None else defaults.ttft_slo_ms / 1e3,
        cost_weight=defaults.lambda_per_microusd,
        latency_weight=defaults.delta_per_s,
        policy=defaults.policy,
    )


def lognormal(
    random: np.random.Generator, mean: float, sigma: float, count: int
) -> NDArray[np.float64]:
    """With that mean, and that sigma of the logarithm."""
    return random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)


def lognormal_tokens(
    random: np.random.Generator, mean: float, sigma: float, count: int, longest: int
) -> NDArray[np.int64]:
    """Lengths as ``lognormal`` has them; tails end at 1 and ``longest``."""
    lengths = lognormal(random, mean, sigma, count)
    return np.clip(np.rint(lengths), 1, longest).astype(np.int64)


def random_tokens(random: np.random.Generator, count: int) -> TokenIds:
    """Content that nothing else shares."""
    return random.integers(0, 2**31 - 1, count, dtype=np.int32)
