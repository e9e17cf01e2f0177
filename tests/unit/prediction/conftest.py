"""One trained predictor for all tests, of few prompts and few trees: training takes seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from planted import CARDS, planted

from app.config import QwenTokenizerSettings
from app.prediction import artifact as artifacts
from app.prediction.artifact import Artifact
from app.prediction.training import train
from app.prediction.validation import cross_validate

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    two_folds = partial(cross_validate, count=2)
    monkeypatch.setattr("app.prediction.training.cross_validate", two_folds)
    monkeypatch.setattr("app.prediction.fitting.INNER_FOLDS", 2)
    monkeypatch.setattr("app.prediction.fitting.QUALITY_TREES", 4)
    monkeypatch.setattr("app.prediction.fitting.LENGTH_TREES", 4)


@pytest.fixture(scope="session")
def artifact() -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.prediction.fitting.INNER_FOLDS", 2)
        patch.setattr("app.prediction.fitting.QUALITY_TREES", 10)
        patch.setattr("app.prediction.fitting.LENGTH_TREES", 10)
        tokenizer = QwenTokenizerSettings(kind="qwen")
        return train(planted(60), CARDS, tokenizer, clock=lambda: 1_700_000_000.0)


@pytest.fixture
def predictor_file(artifact: Artifact, tmp_path: Path) -> Path:
    path = tmp_path / "predictor.json"
    artifacts.save(artifact, path)
    return path


@pytest.fixture
def forge(predictor_file: Path) -> Callable[[Change], Path]:
    """Changes what the file says, and its checksum with it."""

    def forge(change: Change) -> Path:
        predictor = json.loads(predictor_file.read_text())["predictor"]
        change(predictor)
        whole = {"sha256": artifacts._sha256(predictor), "predictor": predictor}
        predictor_file.write_text(json.dumps(whole))
        return predictor_file

    return forge
