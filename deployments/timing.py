"""An engine's batch times: as the settings give them, or as its own steps show them."""

from __future__ import annotations

from dataclasses import dataclass

from app.calibration import fit_batch_time
from app.estimators import throughput_rates
from sfs_ext import BatchTime, SchedulerConfig, SnapshotReader

RECENT_STEPS = 2000
"""What a fit rests on: enough for four coefficients, recent enough to follow a machine's load."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What a forecast needs of an engine, and ``source``: ``settings`` or ``steps``."""

    batch_time: BatchTime
    source: str
    prefill_tokens_per_s: float
    decode_step_s: float


def given(scheduler: SchedulerConfig, batch_time: BatchTime) -> Timing:
    return Timing(batch_time, "settings", *throughput_rates(scheduler, batch_time))


def measured(snapshot_path: str) -> Timing:
    """ValueError where the engine has not taken enough steps of each kind."""
    steps = SnapshotReader(snapshot_path).read_steps(0)[-RECENT_STEPS:]
    fit = fit_batch_time(steps)
    return Timing(fit.batch_time, "steps", fit.prefill_tokens_per_s, fit.decode_step_s)
