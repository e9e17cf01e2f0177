"""What predictors learn from: collected answers, a pool's records, and flat files of others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import decisions
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from planted import features, planted

from app.dataset.answers import Answer
from app.dataset.prompts import Prompt
from app.prediction.examples import (
    Example,
    chat_features,
    digest,
    examples_of,
    examples_of_records,
    read_examples,
    without_repeats,
)
from app.prediction.features import FEATURE_VERSION
from app.records import DecisionRecord, read_records, write_records
from app.rows import RowError


class Letters:
    """A token for each character; counts what it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def encode_chat(self, messages: Any, *_: Any) -> np.ndarray:
        self.calls += 1
        return np.array([ord(c) % 1000 for m in messages for c in m["content"]], np.int32)


@pytest.fixture
def letters() -> Any:
    return Letters()


def answer(prompt_id: str = "a", model: str = "small", **changed: Any) -> Answer:
    prompt = Prompt(prompt_id, ({"role": "user", "content": f"Say {prompt_id}"},), "chat", None)
    return replace(Answer(prompt, model, "Yes.", 5, 120, "stop", None), **changed)


class TestAnswers:
    def test_scores_find_their_answers(self, letters: Any) -> None:
        answers = [answer("a"), answer("a", "large", output_tokens=None), answer("b")]
        examples = examples_of(answers, {("a", "large"): 0.7, ("b", "small"): 0.2}, letters)
        assert [(e.model, e.task, e.output_tokens, e.quality) for e in examples] == [
            ("small", "chat", 120, None),
            ("large", "chat", None, 0.7),
            ("small", "chat", 120, 0.2),
        ]
        ids = [e.prompt_id for e in examples]
        assert ids[0] == ids[1] != ids[2]
        assert examples[0].prompt is examples[1].prompt
        assert letters.calls == 2
        expected = chat_features(answers[0].prompt.messages, letters)
        assert examples[0].prompt.buckets.tolist() == expected.buckets.tolist()
        assert examples[0].prompt.description.tolist() == expected.description.tolist()

    def test_what_teaches_nothing_is_left_out(self, letters: Any) -> None:
        failed = answer("a", text=None, output_tokens=None, failure="no instance")
        unknown = answer("b", output_tokens=None)
        assert examples_of([failed, unknown], {("a", "small"): 0.5}, letters) == []

    def test_an_answer_scored_zero_and_one_without_tokens_do_teach(self, letters: Any) -> None:
        [example] = examples_of([answer(output_tokens=0)], {("a", "small"): 0.0}, letters)
        assert (example.output_tokens, example.quality) == (0, 0.0)


def record(number: int = 0, **changed: Any) -> DecisionRecord:
    """Of a prompt of its own, answered by large with 150 tokens."""
    seen = features(f"Hello {number}", number, 7, 8)
    large = decisions.forecast(instance_id="large-0", model="large", max_tokens=4096)
    whole = decisions.record(
        decisions.decision(number, replace(large, model="small"), large, chosen=1),
        prompt_hash=seen.buckets.tolist(),
        prompt_description=seen.description.tolist(),
        feature_version=FEATURE_VERSION,
    )
    return replace(whole, **changed)


class TestRecords:
    def test_answers_without_room_for_a_long_one_are_left_out(self) -> None:
        """By the limit: one that ended before it is no fairer a sample."""
        asked = record(1).decision
        cut = [replace(c, max_tokens=399) for c in asked.candidates]
        limited = replace(asked, candidates=tuple(cut))
        assert examples_of_records([record(1, decision=limited, output_tokens=20)]) == []

    def test_what_was_collected_from_the_pool_counts_once(self) -> None:
        [logged] = examples_of_records([record(1)])
        scored = replace(logged, quality=0.5)
        assert without_repeats([scored, logged]) == [scored]
        assert without_repeats([logged, scored]) == [scored]
        longer = replace(logged, output_tokens=151)
        assert without_repeats([logged, longer]) == [logged, longer]

    def test_lengths_of_the_chosen_models(self, tmp_path: Path) -> None:
        write_records(tmp_path / "part.parquet", [record(5)])
        [example] = examples_of_records(read_records(tmp_path))
        assert (example.model, example.output_tokens, example.quality) == ("large", 150, None)
        seen = features("Hello 5", 5, 7, 8)
        assert example.prompt.buckets.dtype == seen.buckets.dtype
        assert example.prompt.buckets.tolist() == seen.buckets.tolist()
        assert example.prompt.description.tolist() == seen.description.tolist()

    @pytest.mark.parametrize(
        ("changed", "count"),
        [
            ({"finish_reason": "length"}, 1),
            ({"finish_reason": "disconnected"}, 0),
            ({"finish_reason": "error"}, 0),
            ({"finish_reason": "abort"}, 0),
            ({"prompt_hash": [], "prompt_description": []}, 0),
            # Nobody made features, whichever version it was.
            ({"prompt_hash": [], "prompt_description": [], "feature_version": 0}, 0),
        ],
    )
    def test_only_whole_answers_whose_prompt_was_seen(
        self, changed: dict[str, Any], count: int
    ) -> None:
        assert len(examples_of_records([record(**changed)])) == count

    def test_other_features_are_refused(self) -> None:
        other = record(3, feature_version=FEATURE_VERSION + 1)
        with pytest.raises(ValueError, match=f"dec-0+3 .*version {FEATURE_VERSION + 1}"):
            examples_of_records([record(), other])

    def test_a_repeated_prompt_is_one_prompt(self) -> None:
        """Else it would be both learnt from and held back."""
        again = replace(record(1), decision=record(2).decision)
        examples = examples_of_records([record(1), again, record(3)])
        assert len(examples) == 3
        assert len({example.prompt_id for example in examples}) == 2


class TestFlatFiles:
    ROW: ClassVar = {
        "prompt": "Why?",
        "model": "small",
        "output_tokens": 12,
        "quality": 0.5,
        "task": "q",
    }

    @pytest.fixture
    def write(self, tmp_path: Path) -> Callable[..., Path]:
        def write(*rows: dict[str, Any] | str) -> Path:
            path = tmp_path / "rows.jsonl"
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            path.write_text("\n".join(lines))
            return path

        return write

    def test_rows(self, write: Callable[..., Path], letters: Any) -> None:
        bare = {"prompt": "Why?", "model": "large", "quality": 1.0}
        first, second = read_examples(write(self.ROW, bare, self.ROW), letters)
        assert (first.model, first.task, first.output_tokens) == ("small", "q", 12)
        assert (second.model, second.task, second.output_tokens) == ("large", "", None)
        assert second.quality == 1.0
        assert first.prompt_id == second.prompt_id and first.prompt is second.prompt
        expected = chat_features([{"role": "user", "content": "Why?"}], letters)
        assert first.prompt.description.tolist() == expected.description.tolist()

    def test_parquet_and_other_names(self, tmp_path: Path, letters: Any) -> None:
        rows = [{"text": "Why?", "llm": name, "tokens": 3} for name in ("small", "other")]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        names = {"text": "prompt", "llm": "model", "tokens": "output_tokens"}
        [example] = read_examples(tmp_path / "rows.parquet", letters, names, ["small"])
        assert (example.model, example.output_tokens) == ("small", 3)

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            ({"model": "small", "quality": 0.5}, "prompt: Field required"),
            ({**ROW, "prompt": ""}, "prompt: "),
            ({**ROW, "prompt": None}, "prompt: "),
            ({"prompt": "Why?", "quality": 0.5}, "model: Field required"),
            ({**ROW, "quality": 1.2}, "quality: "),
            ({**ROW, "quality": "0.5"}, "quality: "),
            ({**ROW, "output_tokens": -1}, "output_tokens: "),
            ({**ROW, "output_tokens": 1.5}, "output_tokens: "),
            ({**ROW, "output_tokens": None, "quality": None}, "output_tokens, quality or both"),
            ('{"prompt": "Why?", "model": "small", "quality": NaN}', "NaN"),
            ("[1]", "not a JSON object"),
            ({**ROW, "quality": 0.6}, "another outcome of small.*line 1"),
            ({**ROW, "output_tokens": 13}, "another outcome of small.*line 1"),
        ],
    )
    def test_what_cannot_be_used_is_named(
        self, write: Callable[..., Path], letters: Any, row: dict[str, Any] | str, why: str
    ) -> None:
        with pytest.raises(RowError, match=f"rows.jsonl, line 2: .*{why}"):
            read_examples(write(self.ROW, row), letters)


class TestDigest:
    EXAMPLES = planted(6)

    def test_it_does_not_depend_on_order(self) -> None:
        shuffled = list(self.EXAMPLES)
        random.Random(0).shuffle(shuffled)
        assert digest(shuffled) == digest(self.EXAMPLES)

    def test_it_is_the_same_in_every_process(self) -> None:
        one = Example("a", "small", features("Hello", 1, 2), "", 12, 0.5)
        assert digest([one]) == "4607a3e929f5aeeaa566e2db23756b44066afbf745900360e58136d7ca19e234"

    @pytest.mark.parametrize(
        "changed",
        [
            {"prompt_id": "another"},
            {"model": "another"},
            {"task": "another"},
            {"output_tokens": 13},
            {"output_tokens": None},
            {"quality": 0.5000001},
            {"quality": None},
            {"prompt": features("Hello", 1, 3)},
            {"prompt": features("Hallo!", 1, 2)},
        ],
    )
    def test_it_changes_with_every_value(self, changed: dict[str, Any]) -> None:
        one = Example("a", "small", features("Hello", 1, 2), "", 12, 0.5)
        rest = self.EXAMPLES
        assert digest([*rest, replace(one, **changed)]) != digest([*rest, one])

    def test_it_changes_with_every_example(self) -> None:
        digests = {digest(self.EXAMPLES[:i]) for i in range(len(self.EXAMPLES) + 1)}
        assert len(digests) == len(self.EXAMPLES) + 1
        assert digest([*self.EXAMPLES, self.EXAMPLES[0]]) != digest(self.EXAMPLES)
