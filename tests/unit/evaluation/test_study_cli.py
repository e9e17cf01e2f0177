from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app.cli import app


@pytest.fixture
def pool_file(tmp_path: Path, pool_data: dict[str, Any]) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_data))
    return str(path)


def test_length_error_writes_its_figures(pool_file: str, tmp_path: Path) -> None:
    arguments = "study length-error --model small --load 0.5 --requests 10 --seed 4 --pool".split()
    folder = tmp_path / "figures" / "new"

    result = CliRunner().invoke(app, [*arguments, pool_file, "-o", str(folder)])

    assert result.exit_code == 0, result.output
    assert "| 50% |" in result.output
    written = json.loads((folder / "length_error.json").read_text())
    assert written["study"]["loads"] == [0.5]
    assert (written["study"]["requests"], written["study"]["seed"]) == (10, 4)
    assert {cell["load"] for cell in written["cells"]} == {0.5}


def test_multi_turn_writes_its_figures(pool_file: str, tmp_path: Path) -> None:
    arguments = "study multi-turn --model small --model large --replicas 1 --chats 8 --pool".split()

    result = CliRunner().invoke(app, [*arguments, pool_file, "-o", str(tmp_path)])

    assert result.exit_code == 0, result.output
    assert result.output.count("| constrained |") == 2
    written = json.loads((tmp_path / "multi_turn.json").read_text())
    assert written["study"]["models"] == ["small", "large"]
    assert len(written["rows"]) == 4


@pytest.mark.parametrize("study", ["length-error", "multi-turn"])
def test_a_model_that_is_not_there_is_named(study: str, pool_file: str) -> None:
    result = CliRunner().invoke(app, ["study", study, "--model", "huge", "--pool", pool_file])

    assert result.exit_code == 2
    assert "no model 'huge'" in result.output


def test_a_pool_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("models: []")

    result = CliRunner().invoke(app, ["study", "multi-turn", "--pool", str(path)])

    assert result.exit_code == 2
    assert "pool.yaml" in result.output
