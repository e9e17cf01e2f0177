"""From forecasts and utilities to a choice, without side effects.

Ties go to the lower latency, then to the earlier position. An instance whose wait has no end is
chosen only where every wait has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PolicyName = Literal[
    "constrained", "lagrangian", "round_robin", "shortest_queue", "latency_agnostic"
]


@dataclass(slots=True)
class Options:
    """The candidates of one query, as columns of equal length."""

    utility: Sequence[float]
    """Eq. 2."""
    ttft_s: Sequence[float]
    """inf where the wait has no end."""
    residents: Sequence[int]
    position: Sequence[int]
    """Of each instance in the pool: the cycle of round robin."""
    ttft_slo_s: float
    latency_weight: float
    """Delta of eq. 5, per second."""
    last_position: int
    """Of the instance chosen before; -1 at first."""

    def __post_init__(self) -> None:
        if not self.utility:
            raise ValueError("no candidate to choose from")
        if any(map(math.isnan, self.utility)) or any(map(math.isnan, self.ttft_s)):
            raise ValueError(f"nan among utility {self.utility} or ttft_s {self.ttft_s}")

    def serving(self) -> Sequence[int]:
        """Those whose wait ends; all where none does."""
        every = range(len(self.ttft_s))
        return [i for i in every if math.isfinite(self.ttft_s[i])] or every


@dataclass(slots=True)
class Choice:
    index: int
    reason: str
    """A clause, to follow the name of the chosen."""
    least_utility: float = -math.inf
    """Whatever is worth less could not have been chosen instead, however soon it answered."""


Policy = Callable[[Options], Choice]


def feasible(ttft_s: float, ttft_slo_s: float) -> bool:
    """In J of eq. 3. An endless wait is within no target, not even none."""
    return math.isfinite(ttft_s) and ttft_s <= ttft_slo_s


def constrained(options: Options) -> Choice:
    """Eq. 3: the best utility among those in time; where none is, the soonest."""
    serving = options.serving()
    in_time = [i for i in serving if feasible(options.ttft_s[i], options.ttft_slo_s)]
    if in_time:
        i = _best(options, in_time, lambda i: options.utility[i])
        answers = "answers" if len(in_time) == 1 else "answer"
        best = f"best utility {options.utility[i]:.3g} of {len(in_time)} that {answers}"
        return Choice(i, f"{best} {_in_time(options)}", options.utility[i])
    i = _best(options, serving, lambda i: -options.ttft_s[i])
    soonest = f"soonest of {len(serving)}, {_latency(options.ttft_s[i])}"
    return Choice(i, f"{soonest}; none answers {_in_time(options)}")


def lagrangian(options: Options) -> Choice:
    """Eq. 5: the best utility less delta times latency."""
    delta = options.latency_weight

    def score(i: int) -> float:
        return options.utility[i] - (delta * options.ttft_s[i] if delta else 0.0)

    serving = options.serving()
    i = _best(options, serving, score)
    weighed = f"{options.utility[i]:.3g} less {delta:g}/s for {_latency(options.ttft_s[i])}"
    reason = f"best utility less latency of {len(serving)}, {weighed}"
    return Choice(i, reason, score(i) if math.isfinite(options.ttft_s[i]) else -math.inf)


def round_robin(options: Options) -> Choice:
    """The next in the cycle after the one before."""
    serving = options.serving()
    later = [i for i in serving if options.position[i] > options.last_position]
    i = min(later or serving, key=lambda i: options.position[i])
    return Choice(i, f"next in turn of {len(serving)}")


def shortest_queue(options: Options) -> Choice:
    """Fewest resident requests, queued and running."""
    serving = options.serving()
    i = _best(options, serving, lambda i: -options.residents[i])
    return Choice(i, f"fewest resident requests of {len(serving)}, {options.residents[i]}")


def latency_agnostic(options: Options) -> Choice:
    """The best utility, however late."""
    serving = options.serving()
    i = _best(options, serving, lambda i: options.utility[i])
    reason = f"best utility {options.utility[i]:.3g} of {len(serving)}, however late"
    serves = math.isfinite(options.ttft_s[i])
    return Choice(i, reason, options.utility[i] if serves else -math.inf)


POLICIES: Mapping[str, Policy] = {
    "constrained": constrained,
    "lagrangian": lagrangian,
    "round_robin": round_robin,
    "shortest_queue": shortest_queue,
    "latency_agnostic": latency_agnostic,
}


def _best(options: Options, among: Sequence[int], score: Callable[[int], float]) -> int:
    return max(among, key=lambda i: (score(i), -options.ttft_s[i], -options.position[i]))


def _in_time(options: Options) -> str:
    slo_s = options.ttft_slo_s
    return f"within {slo_s * 1e3:.0f} ms" if math.isfinite(slo_s) else "at all"


def _latency(ttft_s: float) -> str:
    return f"{ttft_s * 1e3:.0f} ms" if math.isfinite(ttft_s) else "an endless wait"
