"""The instances of a pool as a router knows them, and which of them are alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.rates import ArrivalRate, RunningMean
from app.types import AUTO, InstanceSpec, ModelSpec, Query

ARRIVAL_HORIZON_S = 10.0
DELAY_WEIGHT = 0.1
"""Of the newest dispatch or return delay in its running mean."""


@dataclass(slots=True)
class Instance:
    """One, and what the router has observed of it."""

    spec: InstanceSpec
    handle: int
    """In the fleet."""
    position: int
    """In the pool: counts additions."""
    snapshot_path: str | None = None
    arrivals: ArrivalRate = field(default_factory=lambda: ArrivalRate(ARRIVAL_HORIZON_S))
    dispatch_delay: RunningMean = field(default_factory=lambda: RunningMean(DELAY_WEIGHT))
    return_delay: RunningMean = field(default_factory=lambda: RunningMean(DELAY_WEIGHT))

    @property
    def context_tokens(self) -> int:
        scheduler = self.spec.scheduler
        limits = scheduler.max_model_len, scheduler.kv_capacity_tokens
        return min(self.spec.model.context_tokens, *limits)


class Replicas:
    """Instances of one model with one context: to a query they differ by load alone."""

    __slots__ = ("context_tokens", "handles", "instances", "model", "positions")

    def __init__(
        self, model: ModelSpec, context_tokens: int, instances: Sequence[Instance]
    ) -> None:
        self.model = model
        self.context_tokens = context_tokens
        self.instances = instances
        self.handles = np.array([one.handle for one in instances], np.int32)
        self.positions = np.array([one.position for one in instances], np.int64)

    def room_tokens(self, query: Query) -> int:
        """For an answer, behind the query's prompt."""
        return self.context_tokens - len(query.prompts[self.model.tokenizer])

    def without(self, instance_ids: frozenset[str]) -> Replicas:
        left = [one for one in self.instances if one.spec.instance_id not in instance_ids]
        return Replicas(self.model, self.context_tokens, left)


def by_model(instances: Iterable[Instance]) -> Mapping[str, Sequence[Replicas]]:
    """Under each model's name, and all of them under ``auto``."""
    alike: dict[tuple[ModelSpec, int], list[Instance]] = {}
    for one in instances:
        alike.setdefault((one.spec.model, one.context_tokens), []).append(one)
    grouped = {AUTO: [Replicas(*key, members) for key, members in alike.items()]}
    for replicas in grouped[AUTO]:
        grouped.setdefault(replicas.model.name, []).append(replicas)
    return grouped
