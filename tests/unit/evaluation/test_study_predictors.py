"""The study of predictors on a small file of judged answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from app.cli import app

PROMPTS = 20
MODELS = ["small:0.6:0.1:0.4", "large:8.2:0.5:1.0"]


@pytest.fixture(autouse=True)
def _few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.prediction.fitting.INNER_FOLDS", 2)
    monkeypatch.setattr("app.prediction.fitting.QUALITY_TREES", 2)
    monkeypatch.setattr("app.prediction.fitting.LENGTH_TREES", 2)


def rows() -> list[dict[str, Any]]:
    """Large is better but for every fourth prompt; a stranger is in the file, too."""
    return [
        {"prompt": f"Explain {i}.", "model": model, "output_tokens": tokens + i, "score": score}
        for i in range(PROMPTS)
        for model, tokens, score in (
            ("small", 50, 0.9 if i % 4 == 0 else 0.2),
            ("large", 100, 0.6),
            ("stranger", 1, 1.0),
        )
    ]


def study(path: Path, written: list[dict[str, Any]], *options: str) -> Result:
    (path / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    named = [word for model in MODELS for word in ("--model", model)]
    arguments = ["study", "predictors", str(path / "judged.jsonl"), *named, "-o", str(path)]
    return CliRunner().invoke(app, [*arguments, *options])


def test_figures_of_routers_of_which_one_knows_everything(tmp_path: Path) -> None:
    result = study(tmp_path, rows(), "--rename", "score=quality")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "predictors.json").read_text())
    assert figures["main"]["prompts"] == PROMPTS
    assert [model["model"] for model in figures["main"]["models"]] == ["small", "large"]
    routing = figures["main"]["routing"]
    assert routing["best_single"]["mean"] == pytest.approx(0.6)
    assert routing["oracle"]["mean"] == pytest.approx(0.25 * 0.9 + 0.75 * 0.6)
    curve = {name: [point[0] for point in points] for name, points in figures["curve"].items()}
    assert curve["oracle"][0] == pytest.approx(0.25 * 0.9 + 0.75 * 0.6)
    for utilities in curve.values():
        assert all(
            mine <= best + 1e-12 for mine, best in zip(utilities, curve["oracle"], strict=True)
        )
    _, score, cost = figures["curve"]["means of each model"][0]
    assert score == pytest.approx(0.6)
    # Mean prompt tokens at 0.5, and mean answers of 109.5 tokens at 1.0 micro-dollars.
    assert 109.5 < cost < 109.5 + 0.5 * 40
    assert (
        "boosters, calibrated (the default)" in result.output and "64 components" in result.output
    )


def test_what_it_cannot_study_is_said(tmp_path: Path) -> None:
    unscored = [{k: v for k, v in row.items() if k != "score"} for row in rows()]
    for written, options, problem in (
        (unscored, (), "both output_tokens and quality"),
        (rows(), ("--rename", "score"), "expected column=name"),
        (rows(), ("--model", "small"), "name:billions:price_in:price_out"),
    ):
        result = study(tmp_path, written, *options)
        assert result.exit_code == 2
        assert problem in " ".join(result.output.replace("│", " ").split())
