from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import decisions
import pytest
from typer.testing import CliRunner

from app.cli import app
from app.records import DecisionRecord, write_records
from app.types import Estimator

Serve = Callable[..., AbstractContextManager[Any]]


def record(
    index: int,
    ttft_s: float | None,
    predicted_s: float,
    throughput_s: float,
    estimator: Estimator = Estimator.SFS,
) -> DecisionRecord:
    forecast = decisions.forecast(
        estimator=estimator,
        ttft_s=predicted_s,
        prefill_s=predicted_s,
        throughput_ttft_s=throughput_s,
    )
    return decisions.record(
        decisions.decision(index, forecast),
        ttft_s=ttft_s,
        engine_ttft_s=None,
        dispatch_s=None,
        finish_reason="stop" if ttft_s else "error",
    )


@pytest.fixture
def records(tmp_path: Path) -> Path:
    write_records(
        tmp_path / "records-1.parquet",
        [
            record(0, ttft_s=1.0, predicted_s=1.1, throughput_s=0.5),
            record(1, ttft_s=2.0, predicted_s=1.6, throughput_s=5.0),
            record(2, ttft_s=None, predicted_s=1.0, throughput_s=1.0),
            record(3, ttft_s=4.0, predicted_s=5.0, throughput_s=math.nan, estimator=Estimator.LPS),
            record(
                4, ttft_s=1.0, predicted_s=3.0, throughput_s=3.0, estimator=Estimator.THROUGHPUT
            ),
        ],
    )
    return tmp_path


SFS_ROW = "| all | sfs | 2 | 1500.0 | 15.0% | 10.0% | 20.0% | -5.0% |"


def test_accuracy_of_the_estimator_in_use_beside_the_throughput_estimator(records: Path) -> None:
    result = CliRunner().invoke(app, ["accuracy", str(records)])

    assert result.exit_code == 0
    # Throughput: -50%, +150% and, where it was in use itself, +200%; once, not twice.
    assert result.output.splitlines()[-5:] == [
        "| all | lps | 1 | 4000.0 | 25.0% | 25.0% | 25.0% | +25.0% |",
        SFS_ROW,
        "| all | throughput | 3 | 1333.3 | 133.3% | 150.0% | 200.0% | +100.0% |",
        "",
        "left out: 1 requests without a first token",
    ]


def test_accuracy_without_anything_to_compare_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["accuracy", str(tmp_path)])

    assert result.exit_code == 1
    assert "no record of a first token" in result.output


def test_load_writes_every_outcome(serve: Serve, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    with serve() as server:
        result = CliRunner().invoke(
            app,
            [
                "load",
                server.url,
                "--rate",
                "200",
                "--requests",
                "4",
                "--seed",
                "3",
                "--prompt-words",
                "500",
                "-o",
                str(output),
            ],
        )

    assert result.exit_code == 0
    assert "4 of 4 answered" in result.output
    written = json.loads(output.read_text())
    assert (written["load"]["seed"], written["load"]["prompt_words"]) == (3, 500)
    assert [r["output_tokens"] for r in written["requests"]] == [3] * 4


def test_load_shows_the_accuracy_of_its_own_requests_alone(serve: Serve, records: Path) -> None:
    with serve() as server:
        result = CliRunner().invoke(
            app,
            ["load", server.url, "--rate", "200", "--requests", "2", "--records", str(records)],
        )

    assert result.exit_code == 0
    assert result.output.splitlines()[-2:] == [
        SFS_ROW,
        "| all | throughput | 2 | 1500.0 | 100.0% | 50.0% | 150.0% | +50.0% |",
    ]


def test_a_record_that_is_there_twice_stands_for_no_other(
    serve: Serve, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.RECORDS_WAIT_S", 0.0)
    again = [record(0, ttft_s=1.0, predicted_s=1.1, throughput_s=0.5) for _ in range(2)]
    write_records(records / "records-2.parquet", again)

    def load(requests: int) -> str:
        with serve() as server:
            arguments = ["load", server.url, "--rate", "200", "--requests", str(requests)]
            return CliRunner().invoke(app, [*arguments, "--records", str(records)]).output

    assert "have no record" not in load(2)
    assert "1 of 6 requests have no record" in load(6)


def test_load_names_its_failures_and_exits_with_1(serve: Serve) -> None:
    with serve("refuse", "ok", "refuse") as server:
        result = CliRunner().invoke(app, ["load", server.url, "--rate", "200", "--requests", "3"])

    assert result.exit_code == 1
    assert "1 of 3 answered" in result.output
    assert "2 failed: http_503, as in: " in result.output
    assert "no instance" in result.output


def test_an_impossible_load_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["load", "http://127.0.0.1:1", "--rate", "0"])

    assert result.exit_code == 2
    assert "rate_qps must be positive" in result.output


@pytest.mark.parametrize("command", [["accuracy"], ["load", "--records"]])
def test_a_folder_of_records_that_is_not_there_is_a_usage_error(
    command: list[str], tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, [*command, str(tmp_path / "absent")])

    assert result.exit_code == 2
    assert "does not exist" in result.output
