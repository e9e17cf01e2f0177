"""Gathers the figures that benchmarks note under ``benchmark.extra_info`` into one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from numbers import Real
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: Sequence[BenchmarkFixture], output_json: dict[str, Any]
) -> None:
    """Called where the runs are saved, as ``make bench`` does: figures go beside them."""
    figures: dict[str, float] = {}
    noted_by: dict[str, str] = {}
    for run in benchmarks:
        for name, value in run.extra_info.items():
            if not isinstance(value, Real) or isinstance(value, bool):
                continue
            if name in figures:
                raise pytest.UsageError(f"{name}: noted by {noted_by[name]} and by {run.fullname}")
            figures[name], noted_by[name] = float(value), run.fullname
    path = config.rootpath / "build/bench.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
