"""What a router gains from knowing what each engine has cached, on chats.

Every turn sends the whole history again, after a system prompt that a tenant's chats share; so the
engine that answered the last turn has cached most of the next prompt, and others at least the
system prompt. The router of the pool in virtual time decides with the engines' KV journals, or
without them, when it takes every prompt for new; round robin and the shortest queue stand beside.
All serve the same chats, word for word, each turn coming a time to think after the answer to the
one before.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from app.config import PoolSettings
from app.evaluation.accuracy import Accuracy
from app.evaluation.chats import Chats
from app.evaluation.virtual_pool import VirtualPool, model_named, sfs_accuracy
from app.policies import PolicyName
from app.prediction import PriorPredictor

WARM_UP = 0.2
"""Share of the time before the last chat begins: the first ones find caches empty."""


MODELS = ("qwen3-8b",)


@dataclass(frozen=True, slots=True)
class MultiTurnStudy:
    models: tuple[str, ...] = MODELS
    replicas: int = 4
    """Of each model."""
    chats_per_s: float = 10.0
    """That begin."""
    chats: int = 1_000
    tenants: int = 8
    ttft_slo_ms: float | None = None
    """None: the pool's own."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("replicas", "chats", "tenants"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.chats_per_s < math.inf:
            raise ValueError(f"chats_per_s must be positive and finite, not {self.chats_per_s}")
        if self.ttft_slo_ms is not None and not self.ttft_slo_ms > 0:
            raise ValueError(f"ttft_slo_ms must be positive, not {self.ttft_slo_ms}")


@dataclass(frozen=True, slots=True)
class Contender:
    policy: PolicyName
    journaled: bool


CONTENDERS = (
    Contender("constrained", journaled=True),
    Contender("constrained", journaled=False),
    Contender("shortest_queue", journaled=False),
    Contender("round_robin", journaled=False),
)


@dataclass(frozen=True, slots=True)
class Row:
    contender: Contender
    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    on_time: float
    """Share within the pool's TTFT target."""
    on_time_utility: float
    """Eq. 4 with predicted quality and cost."""
    hit_rate: float
    """Prompt tokens found cached, of all that were admitted."""
    forecasts: Accuracy


@dataclass(frozen=True, slots=True)
class Results:
    study: MultiTurnStudy
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(settings: PoolSettings, study: MultiTurnStudy) -> Results:
    """Raises ValueError for a model that the pool does not have, or does not emulate."""
    models = tuple(
        model_named(settings, name).model_copy(update={"replicas": study.replicas})
        for name in study.models
    )
    slo_ms = settings.router.ttft_slo_ms if study.ttft_slo_ms is None else study.ttft_slo_ms
    router = settings.router.model_copy(update={"ttft_slo_ms": slo_ms})
    pool = settings.model_copy(update={"models": models, "router": router})
    return Results(study, tuple(_row(pool, study, contender) for contender in CONTENDERS))


def markdown(results: Results) -> str:
    lines = [
        "| policy | KV journals | requests | mean TTFT, ms | p50 | p95 | on time | utility "
        "| prefix hits | forecast MAPE | p95 | bias |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.contender.policy} | {'yes' if row.contender.journaled else 'no'} "
        f"| {row.requests} | {row.ttft_mean_s * 1e3:.1f} | {row.ttft_p50_s * 1e3:.1f} "
        f"| {row.ttft_p95_s * 1e3:.1f} | {row.on_time:.1%} | {row.on_time_utility:.3f} "
        f"| {row.hit_rate:.1%} | {row.forecasts.mape:.1%} | {row.forecasts.p95:.1%} "
        f"| {row.forecasts.bias:+.1%} |"
        for row in results.rows
    ]
    return "\n".join(lines)


def _row(settings: PoolSettings, study: MultiTurnStudy, contender: Contender) -> Row:
    router = settings.router.model_copy(update={"policy": contender.policy})
    settings = settings.model_copy(update={"router": router})
    chats = Chats(settings, study.chats_per_s, study.chats, study.tenants, study.seed)
    pool = VirtualPool(settings, PriorPredictor(settings), journaled=contender.journaled)
    records = pool.run(chats.first_turns(), chats.next_turn)
    end_s = chats.begin_s[-1]
    measured = [r for r in records if WARM_UP * end_s <= r.arrived_s <= end_s]
    ttft_s = np.array([record.ttft_s for record in measured], np.float64)
    on_time = ttft_s <= np.array([record.decision.ttft_slo_s for record in measured])
    utility = np.array([record.decision.choice.utility for record in measured])
    engines = pool.engines.values()
    p50_s, p95_s = np.percentile(ttft_s, [50, 95]).tolist()
    return Row(
        contender=contender,
        requests=len(measured),
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=p50_s,
        ttft_p95_s=p95_s,
        on_time=float(on_time.mean()),
        on_time_utility=float((utility * on_time).mean()),
        hit_rate=sum(e.prefix_hit_tokens for e in engines)
        / sum(e.admitted_prompt_tokens for e in engines),
        forecasts=sfs_accuracy(measured),
    )
