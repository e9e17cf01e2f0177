"""A predictor's file: whole or refused."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import CARDS, planted

from app.config import PoolSettings, QwenTokenizerSettings
from app.prediction import artifact as artifacts
from app.prediction.artifact import Artifact, ArtifactError, encoded, load, save
from app.prediction.features import FEATURE_VERSION, HASH_BUCKETS
from app.prediction.trained import TrainedPredictor
from app.prediction.training import train
from sfs_ext import forest_node_dtype

Predictor = dict[str, Any]
Forge = Callable[[Callable[[Predictor], None]], Path]

QWEN = QwenTokenizerSettings(kind="qwen")
NOT_A_NUMBER = float("nan")


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as refused:
        load(path)
    assert str(path) in str(refused.value)
    return str(refused.value)


class TestRoundTrip:
    def test_it_comes_back_as_it_went(self, artifact: Artifact, predictor_file: Path) -> None:
        assert load(predictor_file) == artifact
        assert [path.name for path in predictor_file.parent.iterdir()] == [predictor_file.name]

    def test_it_says_what_was_learnt(self, artifact: Artifact, predictor_file: Path) -> None:
        kept, loaded = artifact.learned(), load(predictor_file).learned()
        for example in planted(5, seed=4):
            assert loaded.predict(example.prompt) == kept.predict(example.prompt)

    def test_what_it_is_of(self, artifact: Artifact) -> None:
        assert artifact.prompts == 60
        assert artifact.trained_s == 1_700_000_000.0
        assert artifact.tokenizer == QWEN
        assert [(c.name, c.length_examples, c.quality_examples) for c in artifact.cards] == [
            ("small", 60, 60),
            ("large", 60, 60),
        ]
        assert artifact.validation is not None and artifact.validation.folds == 5

    def test_nothing_is_there_before_it_is_whole(
        self, artifact: Artifact, predictor_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = predictor_file.read_bytes()

        def full(self: Path, data: str, **_: Any) -> int:
            with self.open("w") as file:
                file.write(data[:100])
            raise OSError("no space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space"):
            save(artifact, predictor_file)
        assert predictor_file.read_bytes() == before
        assert [path.name for path in predictor_file.parent.iterdir()] == [predictor_file.name]

    def test_it_takes_the_other_ones_place_at_once(
        self, artifact: Artifact, predictor_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever has opened the file that is replaced reads it to its end."""
        with predictor_file.open() as reading:
            save(artifact.model_copy(update={"trained_s": 1.0}), predictor_file)
            assert json.loads(reading.read())["predictor"]["trained_s"] == artifact.trained_s
        assert load(predictor_file).trained_s == 1.0

    def test_folders_are_made(self, artifact: Artifact, tmp_path: Path) -> None:
        save(artifact, tmp_path / "a" / "b.json")
        assert load(tmp_path / "a" / "b.json") == artifact


@pytest.mark.usefixtures("few_trees")
class TestWhatCanBeKept:
    """All that can be trained can be saved: nothing in it is infinite or no number."""

    @pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
    def test_scores_and_lengths_that_are_all_equal(self, score: float, tmp_path: Path) -> None:
        examples = [replace(e, quality=score, output_tokens=64) for e in planted(10)]
        save(train(examples, CARDS, QWEN), tmp_path / "p")
        validation = load(tmp_path / "p").validation
        assert validation is not None
        for model in validation.models:
            assert model.length is not None and model.quality is not None
            assert model.length.mae_of_mean.mean == 0.0
            assert model.length.relative_mae.mean == 1.0

    def test_scores_of_a_model_in_one_fold_alone(self, tmp_path: Path) -> None:
        """The means of its training prompts are of nothing there."""
        examples = [
            replace(e, quality=None) if e.model == "large" and e.prompt_id != "prompt-3" else e
            for e in planted(10)
        ]
        save(train(examples, CARDS, QWEN), tmp_path / "p")
        validation = load(tmp_path / "p").validation
        assert validation is not None
        assert [model.quality is not None for model in validation.models] == [True, False]

    def test_a_model_in_one_fold_alone(self, tmp_path: Path) -> None:
        examples = [e for e in planted(10) if e.model == "small" or e.prompt_id == "prompt-3"]
        save(train(examples, CARDS, QWEN), tmp_path / "p")
        loaded = load(tmp_path / "p")
        assert [card.name for card in loaded.cards] == ["small", "large"]
        assert loaded.validation is not None
        assert [model.model for model in loaded.validation.models] == ["small"]

    @pytest.mark.parametrize("prompts", [1, 4])
    def test_prompts_too_few_to_hold_any_back(self, prompts: int, tmp_path: Path) -> None:
        save(train(planted(prompts), CARDS, QWEN), tmp_path / "p")
        assert load(tmp_path / "p").validation is None

    def test_lengths_alone_and_scores_alone(self, tmp_path: Path) -> None:
        for field in ("quality", "output_tokens"):
            blank: dict[str, Any] = {field: None}
            save(train([replace(e, **blank) for e in planted(5)], CARDS, QWEN), tmp_path / "p")
            loaded = load(tmp_path / "p")
            assert (loaded.quality_calibration is None) == (field == "quality")
            assert (loaded.length_factors == ()) == (field == "output_tokens")
            said = loaded.learned().predict(planted(1)[0].prompt)
            assert (said.quality is None) == (field == "quality")
            assert (said.lengths is None) == (field == "output_tokens")


class TestDamagedFiles:
    def test_no_byte_of_what_is_said_can_change(self, predictor_file: Path) -> None:
        whole = predictor_file.read_bytes()
        places = np.random.default_rng(0).integers(0, len(whole), 40).tolist()
        for place in places:
            for flip in (0x01, 0x80):
                damaged = bytearray(whole)
                damaged[place] ^= flip
                predictor_file.write_bytes(damaged)
                refusal(predictor_file)

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
    def test_truncated(self, share: float, predictor_file: Path) -> None:
        whole = predictor_file.read_bytes()
        predictor_file.write_bytes(whole[: int(share * len(whole))])
        assert "no predictor" in refusal(predictor_file)

    @pytest.mark.parametrize(
        "content",
        [
            b"[]",
            b"null",
            b"3",
            b"{}",
            b"not JSON",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"sha256": "a", "predictor": []}',
            b'{"sha256": "a", "predictor": {}, "more": 1}',
            b'{"sha256": "a", "predictor": {"x": NaN}}',
            b'{"sha256": "a", "predictor": {"x": 1e999}}',
        ],
    )
    def test_something_else(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "p.json").write_bytes(content)
        assert "no predictor" in refusal(tmp_path / "p.json")

    def test_a_folder_and_nothing(self, tmp_path: Path) -> None:
        for path, error in (
            (tmp_path, IsADirectoryError),
            (tmp_path / "absent", FileNotFoundError),
        ):
            with pytest.raises(error):
                artifacts.load(path)

    def test_another_checksum(self, predictor_file: Path) -> None:
        whole = json.loads(predictor_file.read_text())
        predictor_file.write_text(json.dumps({**whole, "sha256": "0" * 64}))
        assert "checksum" in refusal(predictor_file)

    def test_blanks_and_order_are_not_damage(
        self, artifact: Artifact, predictor_file: Path
    ) -> None:
        whole = json.loads(predictor_file.read_text())
        predictor = dict(reversed(whole["predictor"].items()))
        predictor_file.write_text(json.dumps({**whole, "predictor": predictor}, indent=1))
        assert load(predictor_file) == artifact


class TestOthersFiles:
    """With a checksum that is right."""

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"format_version": 1}, "format version 1; this reads 2: train it again"),
            ({"format_version": 3}, "format version 3; this reads 2: train it again"),
            ({"format_version": None}, "format version None; this reads 2"),
            (
                {"feature_version": FEATURE_VERSION + 1},
                f"features of version {FEATURE_VERSION + 1}.*train it again",
            ),
            ({"tokenizer": {"kind": "another"}}, "tokenizer"),
            ({"length_factors": [1.0] * 3}, "length_factors must be 4 or none"),
            ({"length_factors": ["nan"] * 4}, "finite"),
            ({"length_factors": [-1.0] * 4}, "length_factors.0"),
            ({"forest": None}, "forest"),
            ({"forest": {"nodes": "", "roots": ""}}, "forest.output_trees"),
            ({"trained_s": 1e300}, "trained_s"),
            ({"prompts": 10**400}, "prompts"),
            ({"cards": []}, "at least one model"),
            ({"prompts": "many"}, "prompts"),
            ({"unheard_of": 1}, "unheard_of"),
            ({"quality_calibration": None, "length_factors": []}, "neither quality nor length"),
        ],
    )
    def test_what_is_not_of_this_version(self, forge: Forge, changed: Predictor, why: str) -> None:
        assert re.search(why, refusal(forge(lambda predictor: predictor.update(changed))))

    @pytest.mark.parametrize(
        "changed",
        [
            {"length_examples": -10},
            {"parameters_billions": 0.0},
            {"context_tokens": "long"},
            {"context_tokens": 10**400},
        ],
    )
    def test_odd_cards(self, forge: Forge, changed: Predictor) -> None:
        path = forge(lambda predictor: predictor["cards"][1].update(changed))
        assert f"cards.1.{next(iter(changed))}" in refusal(path)

    def test_means_of_fewer_models(self, forge: Forge) -> None:
        path = forge(lambda predictor: predictor["quality_calibration"].update(mean_score=[0.5]))
        assert "mean_score must be as many as cards" in refusal(path)

    @pytest.mark.parametrize(
        "changed", [{"common": -0.1}, {"own": 1.1}, {"mean_score": "high"}, {"more": 1}]
    )
    def test_odd_calibrations(self, forge: Forge, changed: Predictor) -> None:
        path = forge(lambda predictor: predictor["quality_calibration"].update(changed))
        assert f"quality_calibration.{next(iter(changed))}" in refusal(path)

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"pca_mean": encoded(np.full(HASH_BUCKETS, NOT_A_NUMBER))}, "pca_mean.*finite"),
            ({"pca_components": encoded(np.full((3, HASH_BUCKETS), np.inf))}, "finite"),
            ({"pca_mean": encoded(np.zeros(HASH_BUCKETS - 1))}, "pca_mean.*reshape"),
            ({"pca_components": encoded(np.zeros(HASH_BUCKETS + 1))}, "pca_components.*reshape"),
            ({"pca_mean": "not base64!"}, "pca_mean"),
            ({"pca_mean": base64.b64encode(b"odd").decode()}, "pca_mean"),
            ({"pca_mean": "ü"}, "pca_mean"),
            (
                {"pca_components": encoded(np.zeros((3, HASH_BUCKETS)))},
                "forest: tree .*, node .*: feature .* is not one of",
            ),
            ({"quality_calibration": None}, "forest of 5 outputs; there is no calibration"),
            ({"length_factors": []}, "forest of 5 outputs; .* 0 length factors"),
            ({"length_factors": [1.0, 1e308, 1.0, 1.0]}, "length factor 1.*infinite"),
        ],
    )
    def test_what_does_not_fit_together(
        self, forge: Forge, pool: PoolSettings, changed: Predictor, why: str
    ) -> None:
        loaded = load(forge(lambda predictor: predictor.update(changed)))
        with pytest.raises(ArtifactError, match=why):
            TrainedPredictor(loaded, pool)

    @pytest.mark.parametrize(
        ("field", "content", "why"),
        [
            ("nodes", "not base64!", "forest.nodes"),
            ("nodes", "\udc80", "forest.nodes"),
            ("nodes", base64.b64encode(b"odd").decode(), "forest.nodes: buffer size"),
            ("nodes", "", "forest: tree 0, node 0: the root"),
            ("roots", "", "forest: output 0 of 10 trees; 0 are left"),
            ("roots", encoded(np.array([0, 2**30], np.int32)), "forest: output 0"),
            ("output_trees", encoded(np.array([50], np.int32)), "forest of 1 outputs"),
            ("output_trees", encoded(np.array([10, 10, 10, 10, 9], np.int32)), "last 1 trees"),
        ],
    )
    def test_no_forest(
        self, forge: Forge, pool: PoolSettings, field: str, content: str, why: str
    ) -> None:
        path = forge(lambda predictor: predictor["forest"].update({field: content}))
        with pytest.raises(ArtifactError, match=why):
            TrainedPredictor(load(path), pool)

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda nodes: nodes["value"].fill(np.nan), "forest: tree 0, node"),
            (lambda nodes: nodes["left"].fill(0), "tree 0, node 0: child 0 is not behind it"),
            (lambda nodes: nodes["feature"].fill(2**31 - 1), "node 0: feature 2147483647"),
            (lambda nodes: nodes["kind"].fill(77), "node 0: kind 77 is unknown"),
            (lambda nodes: nodes["words"].fill(2**31 - 1), "its set of 2147483647 words"),
            (lambda nodes: nodes["value"].fill(1e300), "qualities may be beyond 1e100"),
        ],
    )
    def test_hostile_nodes(
        self, forge: Forge, pool: PoolSettings, change: Callable[[Any], None], why: str
    ) -> None:
        def changed(predictor: Predictor) -> None:
            forest = predictor["forest"]
            nodes = np.frombuffer(base64.b64decode(forest["nodes"]), forest_node_dtype).copy()
            change(nodes)
            forest["nodes"] = encoded(nodes)

        with pytest.raises(ArtifactError, match=why):
            TrainedPredictor(load(forge(changed)), pool)


def test_only_training_needs_lightgbm(predictor_file: Path) -> None:
    code = f"""
import sys
sys.modules["lightgbm"] = None  # an import of it fails
import numpy as np
import app.cli, deployments.router
from app.prediction.artifact import load
from app.prediction.features import prompt_features
prompt = prompt_features(np.arange(9, dtype=np.int32), "Briefly, why?")
said = load({str(predictor_file)!r}).learned().predict(prompt)
assert np.isfinite(said.quality).all() and np.isfinite(said.lengths).all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_write_goes_beside_the_file(artifact: Artifact, tmp_path: Path) -> None:
    """A move between file systems would not be one step."""
    moves: list[tuple[Path, Path]] = []
    really = os.replace

    def replacing(source: Any, target: Any) -> None:
        moves.append((Path(source), Path(target)))
        really(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts.os, "replace", replacing)
        save(artifact, tmp_path / "p.json")
    [(source, target)] = moves
    assert source.parent == target.parent == tmp_path


def test_a_file_holds_nothing_but_what_was_learnt(predictor_file: Path) -> None:
    """Between the fields of a node lies a gap, which must not show what was in memory before."""
    nodes = load(predictor_file).learned().trees.nodes
    texts = set()
    for _ in range(50):
        spoilt = np.full(nodes.nbytes, 255, np.uint8).view(nodes.dtype)
        for name in nodes.dtype.names or ():
            spoilt[name] = nodes[name]
        texts.add(encoded(spoilt))
    assert texts == {encoded(nodes)}
    assert json.loads(predictor_file.read_text())["predictor"]["forest"]["nodes"] in texts
