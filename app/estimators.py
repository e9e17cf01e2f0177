"""TTFT of one query on one instance: SFS, throughput, LPS, prior, from the best to the bluntest.

Each estimator speaks or declines; the first of its ladder that speaks is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.types import Estimator, InstanceSpec, LpsParameters
from sfs_ext import BatchTime, SchedulerConfig


@dataclass(slots=True)
class Observation:
    """What the router knows of an instance when a query asks."""

    spec: InstanceSpec
    prompt_tokens: int
    arrival_qps: float
    """Alpha of eq. 10."""
    servable: bool
    """The engine could ever admit such a prompt."""
    fresh: bool
    """A snapshot is there, and recent enough to believe."""
    simulated: bool
    """The simulation reached the first token before its bound."""
    simulated_waiting_s: float
    simulated_prefill_s: float
    queued_prefill_tokens: int


@dataclass(slots=True)
class Estimate:
    """Eq. 1: TTFT is waiting plus prefill and first decode, from the query's arrival there."""

    estimator: Estimator
    waiting_s: float
    prefill_s: float

    @property
    def ttft_s(self) -> float:
        return self.waiting_s + self.prefill_s


def sfs(seen: Observation) -> Estimate | None:
    """Eqs. 7-9, simulated by ``Fleet.forecast``."""
    if not (seen.fresh and seen.simulated):
        return None
    return Estimate(Estimator.SFS, seen.simulated_waiting_s, seen.simulated_prefill_s)


def throughput(seen: Observation) -> Estimate | None:
    """Eq. 6."""
    if not seen.fresh:
        return None
    waiting_s = seen.queued_prefill_tokens / seen.spec.prefill_tokens_per_s
    return Estimate(Estimator.THROUGHPUT, waiting_s, _uncontended_s(seen))


def lps(seen: Observation) -> Estimate | None:
    """Eq. 12 for the wait; declines without parameters."""
    if seen.spec.lps is None:
        return None
    return Estimate(
        Estimator.LPS, lps_waiting_s(seen.spec.lps, seen.arrival_qps), _uncontended_s(seen)
    )


def prior(seen: Observation) -> Estimate:
    """What the settings say."""
    return Estimate(Estimator.PRIOR, 0.0, seen.spec.prior_ttft_s)


LADDERS: Mapping[Estimator, tuple[Callable[[Observation], Estimate | None], ...]] = {
    Estimator.SFS: (sfs, throughput, lps),
    Estimator.THROUGHPUT: (throughput, lps),
    Estimator.LPS: (lps,),
}


def estimate(preferred: Estimator, seen: Observation) -> Estimate:
    if not seen.servable:
        return Estimate(preferred, math.inf, 0.0)
    for estimator in LADDERS[preferred]:
        spoken = estimator(seen)
        if spoken is not None:
            return spoken
    return prior(seen)


def lps_waiting_s(
    parameters: LpsParameters,
    arrival_qps: float,
    arrival_cv2: float = 1.0,
    service_cv2: float = 1.0,
) -> float:
    """Eq. 13, and at its defaults (Poisson arrivals, memoryless service) eq. 12; inf at rho >= 1.

    ``arrival_cv2``, ``service_cv2``: squared coefficients of variation, ca^2 and cs^2.
    """
    rho = arrival_qps / parameters.capacity_qps
    if rho >= 1:
        return math.inf
    variability = (arrival_cv2 + service_cv2) / 2
    all_busy = float(rho**parameters.parallel_queries)
    return variability * all_busy / (parameters.capacity_qps * (1 - rho))


def _uncontended_s(seen: Observation) -> float:
    return seen.prompt_tokens / seen.spec.prefill_tokens_per_s + seen.spec.decode_step_s


def throughput_rates(scheduler: SchedulerConfig, batch_time: BatchTime) -> tuple[float, float]:
    """theta_pre (tokens/s) and decode step (s) of eq. 6 that ``batch_time`` implies.

    theta_pre: one prompt that fills the token budget. Decode step: 32 sequences (or as many as
    the engine admits) with 1,024 tokens of context each.
    """
    tokens = min(scheduler.max_num_batched_tokens, scheduler.max_model_len)
    prefill_s = batch_time.seconds(tokens, 0, tokens * (tokens + 1) // 2)
    sequences = min(32, scheduler.max_num_seqs)
    context = min(1024, scheduler.max_model_len)
    return tokens / prefill_s, batch_time.seconds(sequences, sequences * context, 0)
