"""Which replicas of a model are worth a forecast, where there are too many to forecast each.

Replicas of one model differ by load alone, so whichever a policy would choose among them comes
first by one key. Here the key is read off their loads, without a simulation; the policy then
chooses among the forecasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW = 8
"""Replicas that are forecast at once."""
MOST = 16
"""Replicas of one model that a decision forecasts, of those with fresh snapshots."""

Indices = NDArray[np.intp]


@dataclass(slots=True)
class Loads:
    """The replicas of one model, as columns of equal length."""

    ttft_s: NDArray[np.float64]
    """As ``Fleet.loads`` has it, on top of the delays: as good as a forecast while no prompt
    waits, some percent off while many do."""
    residents: NDArray[np.int32]
    age_s: NDArray[np.float64]
    """Of the snapshot; nan without one."""
    position: NDArray[np.int64]
    last_position: int
    """Both as in ``app.policies.Options``."""


def soonest(loads: Loads) -> Indices:
    order: Indices = np.argsort(loads.ttft_s, kind="stable")
    return order


def emptiest(loads: Loads) -> Indices:
    order: Indices = np.lexsort((loads.ttft_s, loads.residents))
    return order


def next_in_turn(loads: Loads) -> Indices:
    order: Indices = np.lexsort((loads.position, loads.position <= loads.last_position))
    return order


ORDERS: Mapping[str, Callable[[Loads], Indices]] = {
    "constrained": soonest,
    "lagrangian": soonest,
    "latency_agnostic": soonest,
    "shortest_queue": emptiest,
    "round_robin": next_in_turn,
}


def shortlist(
    policy: str, loads: Loads, stale_after_s: float, silent_after_s: float
) -> Iterator[Indices]:
    """Batches by the policy's key, without those that have fallen silent.

    With the first come a few of which nothing fresh is known: their loads say little, and an
    estimator that needs none will speak for them. Whoever asks for the soonest goes on as long as
    the next batch might hold a sooner one.
    """
    order = ORDERS[policy](loads)
    age_s = loads.age_s[order]
    fresh = age_s <= stale_after_s
    unseen = ~(fresh | (age_s > silent_after_s))
    known = order[fresh]
    yield np.concatenate((known[:FEW], order[unseen][:FEW]))
    if ORDERS[policy] is soonest:
        for start in range(FEW, min(MOST, len(known)), FEW):
            yield known[start : start + FEW]
