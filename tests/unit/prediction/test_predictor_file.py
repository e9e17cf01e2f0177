"""A file that changes under a running router."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from app.config import PoolSettings
from app.prediction import artifact as artifacts
from app.prediction.artifact import Artifact
from app.prediction.source import PredictorFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "predictor.json"


def later(artifact: Artifact, trained_s: float) -> Artifact:
    return artifact.model_copy(update={"trained_s": trained_s})


def test_it_is_taken_up_when_it_appears_and_when_it_is_replaced(
    artifact: Artifact, pool: PoolSettings, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = PredictorFile(pool, path)
    with caplog.at_level(logging.INFO):
        assert file.newer() is None and file.newer() is None
        [missing] = caplog.messages
        assert "cannot be read" in missing and str(path) in missing
        artifacts.save(artifact, path)
        loaded = file.newer()
        assert loaded is not None and loaded.trained_s == artifact.trained_s
        assert f"{artifact.prompts} prompts, {artifact.data_sha256[:12]}" in caplog.messages[-1]
        assert file.newer() is None
        artifacts.save(later(artifact, 5.0), path)
        again = file.newer()
        assert again is not None and again.trained_s == 5.0


def test_one_that_goes_away_is_missed_once_and_welcome_again(
    artifact: Artifact, pool: PoolSettings, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = PredictorFile(pool, path)
    artifacts.save(artifact, path)
    assert file.newer() is not None
    path.unlink()
    for _ in range(3):
        assert file.newer() is None
    assert len(caplog.messages) == 1
    artifacts.save(later(artifact, 5.0), path)
    assert file.newer() is not None
    path.unlink()
    assert file.newer() is None
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text('{"sha256": "a", "predictor": {"x": NaN}}'),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"trained_s", b"trained_x")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_what_cannot_be_used_is_told_once_by_name(
    artifact: Artifact,
    pool: PoolSettings,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Any,
) -> None:
    artifacts.save(artifact, path)
    file = PredictorFile(pool, path)
    damage(path)
    for _ in range(3):
        assert file.newer() is None
    [told] = caplog.messages
    assert str(path) in told
    assert ("cannot be read" if path.is_dir() else "stays as it was") in told
    if path.is_dir():
        path.rmdir()
    artifacts.save(artifact, path)
    assert file.newer() is not None


def test_one_for_another_pool_is_told_by_name(
    artifact: Artifact,
    pool_data: dict[str, Any],
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool_data["tokenizers"]["qwen3"] = {"kind": "huggingface", "path": "elsewhere"}
    artifacts.save(artifact, path)
    assert PredictorFile(PoolSettings.model_validate(pool_data), path).newer() is None
    assert str(path) in caplog.text and "trained on token ids of" in caplog.text


def test_garbage_with_a_right_checksum(
    artifact: Artifact, pool: PoolSettings, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = artifact.forest.model_copy(update={"nodes": "garbage"})
    artifacts.save(artifact.model_copy(update={"forest": garbage}), path)
    assert PredictorFile(pool, path).newer() is None
    assert str(path) in caplog.text and "forest.nodes" in caplog.text


def test_one_that_is_written_in_place_is_read_again(
    artifact: Artifact, pool: PoolSettings, path: Path
) -> None:
    """As by cp, which does not put it there at once."""
    artifacts.save(artifact, path)
    whole = path.read_text()
    path.write_text(whole[:1000])
    file = PredictorFile(pool, path)
    assert file.newer() is None
    with path.open("a") as growing:
        growing.write(whole[1000:])
    assert file.newer() is not None


def test_one_of_the_same_size_and_time_is_another(
    artifact: Artifact, pool: PoolSettings, path: Path
) -> None:
    artifacts.save(later(artifact, 5.0), path)
    os.utime(path, ns=(10**18, 10**18))
    file = PredictorFile(pool, path)
    assert file.newer() is not None
    artifacts.save(later(artifact, 6.0), path)
    os.utime(path, ns=(10**18, 10**18))
    loaded = file.newer()
    assert loaded is not None and loaded.trained_s == 6.0
    assert json.loads(path.read_text())["predictor"]["trained_s"] == 6.0


def test_what_may_pass_is_tried_again(
    artifact: Artifact, pool: PoolSettings, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts.save(artifact, path)
    file = PredictorFile(pool, path)
    with monkeypatch.context() as patch:

        def busy(path: Path) -> Artifact:
            raise OSError(11, "Resource temporarily unavailable", str(path))

        patch.setattr(artifacts, "load", busy)
        assert file.newer() is None
    assert file.newer() is not None
