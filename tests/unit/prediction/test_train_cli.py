"""``foretoken train`` and ``foretoken inspect``, as they are called."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import decisions
import pytest
import yaml
from click.testing import Result
from planted import CARDS, features, planted
from typer.testing import CliRunner

from app.cli import app
from app.config import PoolSettings, QwenTokenizerSettings
from app.prediction import artifact as artifacts
from app.prediction.artifact import Artifact, load
from app.prediction.cli import cards
from app.prediction.features import FEATURE_VERSION
from app.prediction.training import train
from app.records import DecisionRecord, write_records

Row = dict[str, Any]
PROMPTS = 8


@pytest.fixture(autouse=True)
def _cheap(few_trees: None) -> None:
    """Every call trains."""


@pytest.fixture
def pool_file(pool_data: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_data))
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, rows: Sequence[Row | str]) -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write


@pytest.fixture
def call(pool_file: Path, tmp_path: Path) -> Callable[..., Result]:
    def call(*arguments: Path | str) -> Result:
        command = ["train", *map(str, arguments)]
        return CliRunner().invoke(
            app, [*command, "--pool", str(pool_file), "-o", str(tmp_path / "predictor.json")]
        )

    return call


def answer(number: int, model: str, **changed: Any) -> Row:
    return {
        "prompt_id": f"p{number}",
        "messages": [{"role": "user", "content": f"Explain number {number}."}],
        "task": "qa",
        "model": model,
        "answer": "Well.",
        "output_tokens": 20 + number,
        "finish_reason": "stop",
        **changed,
    }


ANSWERS = [answer(number, card.name) for number in range(PROMPTS) for card in CARDS]
SCORES = [
    {"prompt_id": f"p{number}", "model": card.name, "score": (number + place) / 10}
    for number in range(PROMPTS)
    for place, card in enumerate(CARDS)
]


def record(number: int, model: str = "small", **changed: Any) -> DecisionRecord:
    seen = features(f"Hello {number}", number, 7, 8)
    forecast = decisions.forecast(instance_id=f"{model}-0", model=model, max_tokens=4096)
    whole = decisions.record(
        decisions.decision(number, forecast),
        output_tokens=150 + number,
        prompt_hash=seen.buckets.tolist(),
        prompt_description=seen.description.tolist(),
        feature_version=FEATURE_VERSION,
    )
    return replace(whole, **changed)


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., Path]:
    def log(*records: DecisionRecord) -> Path:
        folder = tmp_path / "records"
        folder.mkdir()
        write_records(folder / "records-1.parquet", records)
        return folder

    return log


class TestTrain:
    def test_answers_and_scores(
        self, call: Callable[..., Result], write: Callable[..., Path], tmp_path: Path
    ) -> None:
        failed = answer(99, "small", answer=None, output_tokens=None, failure="no instance")
        answers = write("answers.jsonl", [*ANSWERS, failed])
        result = call(answers, "--scores", write("scores.jsonl", SCORES))
        assert result.exit_code == 0, result.output
        artifact = load(tmp_path / "predictor.json")
        assert artifact.prompts == PROMPTS
        assert [(c.name, c.length_examples, c.quality_examples) for c in artifact.cards] == [
            ("small", PROMPTS, PROMPTS),
            ("large", PROMPTS, PROMPTS),
        ]
        assert [card.context_tokens for card in artifact.cards] == [4096, 8192]
        assert artifact.tokenizer == QwenTokenizerSettings(kind="qwen")
        assert f"{PROMPTS} prompts in 2 folds" in result.output
        assert "| output length |" in result.output and "| quality |" in result.output
        assert "best single model" in result.output
        assert result.output.splitlines()[-1] == (
            f"{tmp_path / 'predictor.json'}: trained on {PROMPTS} prompts, "
            f"{artifact.data_sha256[:12]}"
        )

    def test_answers_without_scores_teach_lengths(
        self, call: Callable[..., Result], write: Callable[..., Path], tmp_path: Path
    ) -> None:
        assert call(write("answers.jsonl", ANSWERS)).exit_code == 0
        artifact = load(tmp_path / "predictor.json")
        assert artifact.quality_calibration is None and len(artifact.length_factors) == 4
        assert list(artifact.gain_shares) == ["output length"]

    def test_a_pools_own_records(
        self, call: Callable[..., Result], log: Callable[..., Path], tmp_path: Path
    ) -> None:
        ended = [record(i) for i in range(6)]
        lost = record(6, finish_reason="error")
        result = call("--from-log", log(*ended, lost))
        assert result.exit_code == 0, result.output
        artifact = load(tmp_path / "predictor.json")
        assert artifact.prompts == 6
        assert [(card.name, card.length_examples) for card in artifact.cards] == [("small", 6)]

    def test_both(
        self,
        call: Callable[..., Result],
        write: Callable[..., Path],
        log: Callable[..., Path],
        tmp_path: Path,
    ) -> None:
        answers, scores = write("answers.jsonl", ANSWERS), write("scores.jsonl", SCORES)
        records = log(*[record(i) for i in range(3)])
        assert call(answers, "--scores", scores, "--from-log", records).exit_code == 0
        artifact = load(tmp_path / "predictor.json")
        assert artifact.prompts == PROMPTS + 3
        assert [(c.length_examples, c.quality_examples) for c in artifact.cards] == [
            (PROMPTS + 3, PROMPTS),
            (PROMPTS, PROMPTS),
        ]

    def test_the_same_data_in_another_order_have_one_name(
        self, call: Callable[..., Result], write: Callable[..., Path], tmp_path: Path
    ) -> None:
        digests = set()
        for rows in (ANSWERS, ANSWERS[::-1]):
            assert call(write("answers.jsonl", rows)).exit_code == 0
            digests.add(load(tmp_path / "predictor.json").data_sha256)
        assert len(digests) == 1


class TestRefused:
    @pytest.fixture(autouse=True)
    def _nothing_is_written(self, tmp_path: Path) -> Any:
        yield
        assert not (tmp_path / "predictor.json").is_file()

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            (answer(0, "small", messages=[]), "line 2: messages is empty"),
            (answer(0, "small", answer=None), "line 2: .*either answer.*or failure"),
            (answer(3, "small", messages=[{"role": "user"}]), "line 2: .*content"),
            ({"prompt_id": "p0", "model": "small"}, "line 2: messages"),
            (answer(0, "large", answer="Other."), "line 2: another answer of large"),
            (answer(0, "small", messages=[{"role": "user", "content": "?"}]), "line 2: .*messages"),
            (answer(0, "stranger"), ": answers of stranger; the pool has small, large"),
            ("{", "line 2: "),
        ],
    )
    def test_answers(
        self, call: Callable[..., Result], write: Callable[..., Path], row: Row | str, why: str
    ) -> None:
        path = write("answers.jsonl", [answer(0, "large"), row])
        result = call(path)
        assert result.exit_code == 1
        assert "not trained: " in result.output
        assert re.search(rf"{re.escape(str(path))},? ?{why}", result.output), result.output

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            ('{"prompt_id": "p1", "model": "small", "score": NaN}', "NaN"),
            ({"prompt_id": "p1", "model": "small", "score": 1.1}, "score"),
            ({"prompt_id": "p1", "model": "stranger", "score": 1}, "stranger"),
            ({"prompt_id": "p99", "model": "small", "score": 1}, "p99"),
            ({"prompt_id": "p0", "model": "small", "score": 0.9}, "0.9 here and 0.0 in line 1"),
        ],
    )
    def test_scores(
        self, call: Callable[..., Result], write: Callable[..., Path], row: Row | str, why: str
    ) -> None:
        scores = write("scores.jsonl", [SCORES[0], row])
        result = call(write("answers.jsonl", ANSWERS), "--scores", scores)
        assert result.exit_code == 1
        assert f"{scores}, line 2: " in result.output and why in result.output

    def test_nothing_to_learn_from(
        self, call: Callable[..., Result], write: Callable[..., Path], log: Callable[..., Path]
    ) -> None:
        failed = answer(0, "small", answer=None, output_tokens=None, failure="no instance")
        silent = answer(1, "small", output_tokens=None)
        records = log(record(0, finish_reason="error"))
        for arguments in (
            [write("none.jsonl", [])],
            [write("failed.jsonl", [failed, silent])],
            ["--from-log", records],
        ):
            result = call(*arguments)
            assert result.exit_code == 1
            assert "no answer to learn from" in result.output

    def test_records_with_other_features(
        self, call: Callable[..., Result], log: Callable[..., Path]
    ) -> None:
        records = log(record(0, feature_version=FEATURE_VERSION + 1))
        result = call("--from-log", records)
        assert result.exit_code == 1
        assert f"{records}: record dec-" in result.output

    def test_records_of_a_model_that_the_pool_has_not(
        self, call: Callable[..., Result], log: Callable[..., Path]
    ) -> None:
        records = log(record(0), record(1, "stranger"))
        result = call("--from-log", records)
        assert result.exit_code == 1
        assert f"{records}: answers of stranger" in result.output

    def test_what_is_no_record(self, call: Callable[..., Result], tmp_path: Path) -> None:
        path = tmp_path / "records.parquet"
        path.write_text("no Parquet")
        result = call("--from-log", path)
        assert result.exit_code == 1 and "not trained" in result.output

    @pytest.mark.parametrize("arguments", [[], ["--scores", "SCORES"], ["absent.jsonl"]])
    def test_usage(
        self, call: Callable[..., Result], write: Callable[..., Path], arguments: list[str]
    ) -> None:
        scores = write("scores.jsonl", SCORES)
        result = call(*[scores if word == "SCORES" else word for word in arguments])
        assert result.exit_code == 2

    def test_pool(
        self, call: Callable[..., Result], write: Callable[..., Path], pool_file: Path
    ) -> None:
        pool_file.write_text("models: []")
        result = call(write("answers.jsonl", ANSWERS))
        assert result.exit_code == 1 and str(pool_file) in result.output


def test_where_it_cannot_be_written(
    call: Callable[..., Result], write: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "predictor.json").mkdir()
    result = call(write("answers.jsonl", ANSWERS[:2]))
    assert result.exit_code == 1
    assert "predictor.json" in result.output and isinstance(result.exception, SystemExit)


class TestInspect:
    def test_all_that_it_tells(self, artifact: Artifact, predictor_file: Path) -> None:
        result = CliRunner().invoke(app, ["inspect", str(predictor_file)])
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert lines[0].startswith("Trained 2023-11-14T22:13:20+00:00 on 60 prompts")
        assert artifact.data_sha256[:12] in lines[0]
        assert "| small | 60 | 60 |" in lines
        assert any(line.startswith("Of what the quality booster says, ") for line in lines)
        for head in ("what quality goes by", "what output length goes by"):
            place = lines.index(f"| {head} | share of the gain |")
            shares = [line.split("|")[2] for line in lines[place + 2 : place + 14]]
            gains = [float(share.strip().removesuffix("%")) for share in shares]
            assert gains == sorted(gains, reverse=True) and 0 < sum(gains) <= 100.5
        # What lengths were made to follow.
        assert any(line.startswith("| asks_long | ") for line in lines)
        place = lines.index("| calibration | predicted quality | mean score | answers |")
        assert (
            len([li for li in lines[place:] if li.startswith(("| small | ", "| large | "))]) == 20
        )
        assert any(line.startswith("| code | ") for line in lines)
        assert any(line.startswith("| prompts of 32 to 63 tokens | ") for line in lines)
        assert "nan" not in result.output

    @pytest.mark.parametrize("suffix", ["svg", "png"])
    def test_a_plot(self, predictor_file: Path, tmp_path: Path, suffix: str) -> None:
        plot = tmp_path / f"curves.{suffix}"
        result = CliRunner().invoke(app, ["inspect", str(predictor_file), "--plot", str(plot)])
        assert result.exit_code == 0, result.output
        begin = plot.read_bytes()[:5]
        assert begin.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        unscored = [replace(e, quality=None) for e in planted(3)]
        path = tmp_path / "lengths.json"
        artifacts.save(train(unscored, CARDS, QwenTokenizerSettings(kind="qwen")), path)
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert result.exit_code == 0 and "3 prompts are too few" in result.output
        assert "what quality goes by" not in result.output
        plot = str(tmp_path / "curves.svg")
        result = CliRunner().invoke(app, ["inspect", str(path), "--plot", plot])
        assert result.exit_code == 1 and f"{path}: no scores" in result.output

    def test_a_plot_in_a_form_that_there_is_not(self, predictor_file: Path, tmp_path: Path) -> None:
        plot = tmp_path / "curves.odd"
        result = CliRunner().invoke(app, ["inspect", str(predictor_file), "--plot", str(plot)])
        assert result.exit_code == 1 and "odd" in result.output

    def test_a_file_that_is_none(self, predictor_file: Path) -> None:
        predictor_file.write_bytes(predictor_file.read_bytes()[:-1])
        result = CliRunner().invoke(app, ["inspect", str(predictor_file)])
        assert result.exit_code == 1 and f"{predictor_file}: no predictor" in result.output

    def test_a_forest_that_is_none(self, artifact: Artifact, tmp_path: Path) -> None:
        path = tmp_path / "p.json"
        garbage = artifact.forest.model_copy(update={"roots": "garbage"})
        artifacts.save(artifact.model_copy(update={"forest": garbage}), path)
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
        assert str(path) in result.output and "forest.roots" in result.output

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / "absent")])
        assert result.exit_code == 2


def test_cards_are_of_the_pools_models(pool: PoolSettings) -> None:
    assert [(c.name, c.parameters_billions, c.context_tokens) for c in cards(pool)] == [
        ("small", None, 4096),
        ("large", None, 8192),
    ]
