import math
import threading
from dataclasses import replace
from pathlib import Path

import decisions
import pyarrow.parquet as pq
import pytest

from app.records import SCHEMA, DecisionRecord, RecordWriter, read_records, write_records
from app.types import Estimator


def record(number: int = 0) -> DecisionRecord:
    forecast = decisions.forecast()
    endless = replace(forecast, instance_id="small-1", estimator=Estimator.LPS, ttft_s=math.inf)
    reason = "small-0: best utility 0.355 of 1 that answers at all."
    return decisions.record(
        decisions.decision(number, forecast, endless, reason=reason),
        prompt_hash=[0, -3, 12],
        prompt_description=[100.0, 0.5],
        feature_version=1,
    )


def unanswered(number: int) -> DecisionRecord:
    return replace(
        record(number), ttft_s=None, engine_ttft_s=None, dispatch_s=None, finish_reason="error"
    )


def test_records_come_back_as_they_went(tmp_path: Path) -> None:
    records = [record(0), unanswered(1)]
    write_records(tmp_path / "part.parquet", records)
    assert read_records(tmp_path / "part.parquet") == records
    assert [path.name for path in tmp_path.iterdir()] == ["part.parquet"]


def test_every_field_has_its_column(tmp_path: Path) -> None:
    write_records(tmp_path / "part.parquet", [record()])
    table = pq.read_table(tmp_path / "part.parquet")
    assert table.schema.equals(SCHEMA, check_metadata=True)
    assert not {"prompt", "prompts", "text", "messages"} & set(table.column_names)


def test_nothing_is_lost_by_closing(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, rows_per_part=64, flush_interval_s=3600)
    adders = [
        threading.Thread(target=lambda k=k: [writer.add(record(100 * k + i)) for i in range(100)])
        for k in range(4)
    ]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join()
    writer.close()
    writer.close()
    ids = {r.decision.decision_id for r in read_records(tmp_path)}
    assert len(ids) == 400
    assert len(list(tmp_path.iterdir())) == 7
    with pytest.raises(ValueError, match="closed"):
        writer.add(record())


def test_records_are_written_in_time_without_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    class Watched(RecordWriter):
        def _flush(self) -> None:
            super()._flush()
            if read_records(tmp_path):
                written.set()

    writer = Watched(tmp_path, rows_per_part=1000, flush_interval_s=0.02)
    writer.add(record())
    assert written.wait(timeout=10)
    writer.close()


def test_what_cannot_be_written_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    writer = RecordWriter(folder, rows_per_part=1000, flush_interval_s=3600)
    writer.add(record())
    folder.rmdir()
    with pytest.raises(OSError, match="records"):
        writer.close()


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    table = SCHEMA.with_metadata({b"foretoken_schema_version": b"0"}).empty_table()
    pq.write_table(table, tmp_path / "old.parquet")
    with pytest.raises(ValueError, match=r"old.parquet.*version 0; this reads 3"):
        read_records(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_records(tmp_path / "nowhere")
