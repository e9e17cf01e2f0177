"""The scheduler core: vLLM's batching rules, forecasts and snapshots, in C++."""

from sfs_ext._core import (
    BatchTime,
    EmulatedEngine,
    Fleet,
    ForecastStatus,
    SchedulerConfig,
    Snapshot,
    SnapshotReader,
    SnapshotWriter,
    batch_dtype,
    block_keys,
    event_dtype,
    expected_output_tokens,
    forecast_dtype,
    query_dtype,
    resident_dtype,
    snapshot_dtype,
    step_dtype,
)
from sfs_ext.replay import replay_workload

__all__ = [
    "BatchTime",
    "EmulatedEngine",
    "Fleet",
    "ForecastStatus",
    "SchedulerConfig",
    "Snapshot",
    "SnapshotReader",
    "SnapshotWriter",
    "batch_dtype",
    "block_keys",
    "event_dtype",
    "expected_output_tokens",
    "forecast_dtype",
    "query_dtype",
    "replay_workload",
    "resident_dtype",
    "snapshot_dtype",
    "step_dtype",
]
