"""What was decided for each request and what came of it, kept as Parquet. Prompts are not kept,
but what predictors see of them is."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.types import Decision, Estimator, Forecast

logger = logging.getLogger(__name__)

SCHEMA_VERSION = "3"
_VERSION_KEY = b"foretoken_schema_version"


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One request: its decision with every candidate's forecast, and the outcome."""

    decision: Decision
    requested_model: str
    arrived_s: float
    """Unix time at the ingress."""
    finished_s: float
    """Unix time at the ingress."""
    max_tokens: int | None
    priority: int
    ttft_s: float | None
    """From the ingress's arrival to its first token; None where none came."""
    engine_ttft_s: float | None
    """From the engine's acceptance to its first token."""
    dispatch_s: float | None
    """From the decision to the engine's acceptance."""
    output_tokens: int
    finish_reason: str
    """The engine's, or ``error``, ``abort``, ``disconnected``."""
    prompt_hash: list[int] = field(default_factory=list)
    prompt_description: list[float] = field(default_factory=list)
    """``PromptFeatures``, which predictors are trained on: empty where none were made. Whoever
    suspects a short prompt can check it against them."""
    feature_version: int = 0


_FORECAST = pa.struct(
    [
        ("instance_id", pa.string()),
        ("model", pa.string()),
        ("estimator", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("max_tokens", pa.int32()),
        ("ttft_s", pa.float64()),
        ("waiting_s", pa.float64()),
        ("prefill_s", pa.float64()),
        ("throughput_ttft_s", pa.float64()),
        ("quality", pa.float64()),
        ("predicted_output_tokens", pa.float64()),
        ("output_tokens_low", pa.float64()),
        ("output_tokens_high", pa.float64()),
        ("length_correction", pa.float64()),
        ("prediction_source", pa.string()),
        ("cost_microusd", pa.float64()),
        ("utility", pa.float64()),
        ("feasible", pa.bool_()),
        ("snapshot_age_s", pa.float64()),
        ("running", pa.int32()),
        ("waiting", pa.int32()),
    ]
)

SCHEMA = pa.schema(
    [
        ("decision_id", pa.string()),
        ("policy", pa.string()),
        ("ttft_slo_s", pa.float64()),
        ("cost_weight", pa.float64()),
        ("latency_weight", pa.float64()),
        ("candidates", pa.list_(pa.field("element", _FORECAST))),
        ("chosen", pa.int32()),
        ("reason", pa.string()),
        ("decision_s", pa.float64()),
        ("pruned", pa.int32()),
        ("requested_model", pa.string()),
        ("arrived_s", pa.float64()),
        ("finished_s", pa.float64()),
        ("max_tokens", pa.int32()),
        ("priority", pa.int32()),
        ("ttft_s", pa.float64()),
        ("engine_ttft_s", pa.float64()),
        ("dispatch_s", pa.float64()),
        ("output_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("prompt_hash", pa.list_(pa.field("element", pa.int32()))),
        ("prompt_description", pa.list_(pa.field("element", pa.float64()))),
        ("feature_version", pa.int32()),
    ],
    metadata={_VERSION_KEY: SCHEMA_VERSION.encode()},
)

_DECISION_FIELDS = tuple(f.name for f in fields(Decision))
_RECORD_FIELDS = tuple(f.name for f in fields(DecisionRecord) if f.name != "decision")


def write_records(path: str | Path, records: Sequence[DecisionRecord]) -> None:
    """One Parquet file, which appears whole or not at all."""
    rows = [_row(record) for record in records]
    hidden = Path(path).with_name(f".{Path(path).name}")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), hidden)
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def read_records(path: str | Path) -> list[DecisionRecord]:
    """Of a file or of all parts in a folder, in the order in which they were written.

    FileNotFoundError; ValueError for a file of another schema version.
    """
    path = Path(path)
    if path.is_dir():
        parts = sorted(part for part in path.glob("*.parquet") if not part.name.startswith("."))
        return [record for part in parts for record in read_records(part)]
    table = pq.read_table(path)
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: records of schema version {version}; this reads {SCHEMA_VERSION}"
        )
    return [_record(row) for row in table.to_pylist()]


def _row(record: DecisionRecord) -> dict[str, Any]:
    # Not asdict(record): that would copy each prompt's hash number by number.
    return asdict(record.decision) | {name: getattr(record, name) for name in _RECORD_FIELDS}


def _record(row: dict[str, Any]) -> DecisionRecord:
    row["candidates"] = tuple(
        Forecast(**{**candidate, "estimator": Estimator(candidate["estimator"])})
        for candidate in row["candidates"]
    )
    decision = Decision(**{name: row[name] for name in _DECISION_FIELDS})
    return DecisionRecord(decision, **{name: row[name] for name in _RECORD_FIELDS})


class RecordWriter:
    """Writes part files into a folder from a thread of its own; ``add`` never waits.

    A part is written every ``rows_per_part`` records or ``flush_interval_s`` seconds. What cannot
    be written is kept and tried again; ``close`` raises what still stands in the way.
    """

    def __init__(
        self, folder: str | Path, rows_per_part: int = 1000, flush_interval_s: float = 10.0
    ) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._rows_per_part = rows_per_part
        self._flush_interval_s = flush_interval_s
        self._added: queue.SimpleQueue[DecisionRecord | None] = queue.SimpleQueue()
        self._unwritten: list[DecisionRecord] = []
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="record-writer", daemon=True)
        self._thread.start()

    def add(self, record: DecisionRecord) -> None:
        with self._lock:
            if self._closed:
                raise ValueError("the record writer is closed")
            self._added.put(record)

    def close(self) -> None:
        """Returns when everything added is on disk; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._added.put(None)
        self._thread.join()
        self._flush()

    def _run(self) -> None:
        flush_at_s = time.monotonic() + self._flush_interval_s
        record: DecisionRecord | None
        while True:
            try:
                record = self._added.get(timeout=max(0.0, flush_at_s - time.monotonic()))
                if record is None:
                    return
                self._unwritten.append(record)
                due = len(self._unwritten) % self._rows_per_part == 0
            except queue.Empty:
                due = True
            if due:
                flush_at_s = time.monotonic() + self._flush_interval_s
                try:
                    self._flush()
                except (OSError, pa.ArrowException):
                    logger.exception("records kept in memory: cannot write to %s", self._folder)

    def _flush(self) -> None:
        if self._unwritten:
            name = f"records-{time.time_ns()}-{uuid.uuid4().hex[:8]}.parquet"
            write_records(self._folder / name, self._unwritten)
            self._unwritten = []
