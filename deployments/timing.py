"""An engine's batch times: as the settings give them, or as its own steps show them."""

from __future__ import annotations

from dataclasses import dataclass

from app.calibration import fit_batch_time, slowdown
from app.estimators import throughput_rates
from sfs_ext import BatchTime, SchedulerConfig, SnapshotReader

RECENT_STEPS = 200
"""How many show how fast the engine is just now."""


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
    fit = fit_batch_time(SnapshotReader(snapshot_path).read_steps(0))
    return Timing(fit.batch_time, "steps", fit.prefill_tokens_per_s, fit.decode_step_s)


def at_present(timing: Timing, snapshot_path: str) -> Timing:
    """``timing`` slowed or sped up as a whole, to what the newest steps took.

    One factor and no new fit: the traffic of a moment says little about batches it does not hold,
    and a machine's load slows all of them. ValueError where the engine has taken too few steps.
    """
    newest = SnapshotReader(snapshot_path).read_steps(0)[-RECENT_STEPS:]
    factor = slowdown(timing.batch_time, newest)
    b = timing.batch_time
    return Timing(
        BatchTime(factor * b.b0_s, factor * b.b1_s, factor * b.b2_s, factor * b.b3_s),
        timing.source,
        timing.prefill_tokens_per_s / factor,
        timing.decode_step_s * factor,
    )
