"""Which replicas of a model are worth a forecast, where there are too many to forecast each.

Replicas of one model differ by load alone, so whichever a policy would choose among them comes
first by one key. Here the key is read off their loads, without a simulation; the policy then
chooses among the forecasts. A TTFT read off a load may be too late, above all where it depends on
the last free block; so nobody who might be sooner is left out but for being among too many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEW = 8
"""Replicas that are forecast at once."""
MOST = 96
"""Replicas of one model that a decision forecasts, of those with fresh snapshots."""
NO_DIFFERENCE_S = 1e-6
"""Between two forecasts: Unix time in floating point resolves just less."""

Indices = NDArray[np.intp]


@dataclass(slots=True)
class Loads:
    """The replicas of one model, as columns of equal length."""

    ttft_s: NDArray[np.float64]
    """As ``Fleet.loads`` has it, on top of the delays: as good as a forecast while no prompt
    waits, some percent off while many do."""
    least_ttft_s: NDArray[np.float64]
    """Whose forecast finds less is an exception: see ``sfs::Load``."""
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
    policy: str,
    loads: Loads,
    stale_after_s: float,
    silent_after_s: float,
    forecast: Callable[[Indices], float],
) -> None:
    """Has batches forecast by the policy's key, without those that have fallen silent; ``forecast``
    returns the soonest TTFT so far.

    With the first come a few of which nothing fresh is known: their loads say little, and an
    estimator that needs none will speak for them. Where the policy asks for the soonest, it goes on
    with whoever might be sooner.
    """
    order = ORDERS[policy](loads)
    age_s = loads.age_s[order]
    fresh = age_s <= stale_after_s
    unseen = ~(fresh | (age_s > silent_after_s))
    known = order[fresh]
    soonest_s = forecast(np.concatenate((known[:FEW], order[unseen][:FEW])))
    left = known[FEW:] if ORDERS[policy] is soonest else known[:0]
    for _ in range(FEW, MOST, FEW):
        left = left[loads.least_ttft_s[left] < soonest_s - NO_DIFFERENCE_S]
        if len(left) == 0:
            break
        soonest_s = forecast(left[:FEW])
        left = left[FEW:]
