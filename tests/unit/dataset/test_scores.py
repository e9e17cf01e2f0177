from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.dataset.answers import Answer
from app.dataset.prompts import Prompt
from app.dataset.scores import answer_hash, read_scores
from app.rows import RowError

Write = Callable[..., Path]


def answer(prompt_id: str, model: str, text: str | None = "yes") -> Answer:
    prompt = Prompt(prompt_id, ({"role": "user", "content": prompt_id},), None, None)
    return Answer(prompt, model, text, 7, 3, "stop", None if text is not None else "cut")


ANSWERS = [answer("p", "small"), answer("p", "large", None), answer("q", "large")]


def row(prompt_id: str = "p", model: str = "small", score: Any = 0.5, **more: Any) -> Any:
    return {"prompt_id": prompt_id, "model": model, "score": score, **more}


def test_scores_of_a_judge_and_from_elsewhere(write: Write) -> None:
    hashed = answer_hash(ANSWERS[0])
    path = write(
        "scores.jsonl",
        row(score=0.25, judge_model="judge", answer_hash=hashed, judge_cost_usd=0.1, other=1),
        {"prompt_id": "p", "judge_model": "judge", "failure": "cut"},
        row("q", "large", 1),
    )

    scores = read_scores(path, ANSWERS)

    assert [(s.key, s.score, s.judge_model) for s in scores] == [
        (("p", "small"), 0.25, "judge"),
        (("q", "large"), 1.0, None),
    ]
    assert read_scores(path) == scores


def test_the_newer_score_of_the_same_judge_stands(write: Write) -> None:
    path = write(
        "scores.jsonl",
        row(score=0.1, judge_model="judge"),
        row("q", "large", judge_model="judge"),
        row(score=0.9, judge_model="judge"),
    )

    assert [(s.prompt_id, s.score) for s in read_scores(path)] == [("p", 0.9), ("q", 0.5)]


@pytest.mark.parametrize("judges", [(None, None), ("one", "another"), ("one", None)])
def test_two_scores_that_nothing_orders_name_both_rows(write: Write, judges: Any) -> None:
    first, second = (row(score=0.1, judge_model=judges[0]), row(score=0.9, judge_model=judges[1]))
    path = write("scores.jsonl", first, row("q", "large"), second)

    with pytest.raises(RowError, match=r"line 3: .*small.*'p' scores 0.9 here and 0.1 in line 1"):
        read_scores(path)

    agreed = write("scores.jsonl", first, {**second, "score": 0.1})
    assert len(read_scores(agreed)) == 1


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ('{"prompt_id": "p", "model": "small", "score": NaN}\n', "NaN is not JSON"),
        ('{"prompt_id": "p", "model": "small", "score": 1e999}\n', "score: "),
        (row(score=1.1), "score: "),
        (row(score=-0.1), "score: "),
        (row(score="high"), "score: "),
        (row(score=True), "score: "),
        (row(score=None), "either model and score, or failure"),
        ({"model": "small", "score": 0.5}, "prompt_id: "),
        ({"prompt_id": "p", "score": 0.5}, "either model and score, or failure"),
        (row("z"), "prompt 'z' is not among the answers"),
        (row(model="huge"), "model 'huge' is not among the answers"),
        (row("q", "small"), "small has no answer to prompt 'q'"),
        (row("p", "large"), "large has no answer to prompt 'p'"),
        (row(answer_hash="0123456789abcdef"), "scores another answer of small to prompt 'p'"),
    ],
)
def test_an_error_names_file_and_line(write: Write, second: Any, problem: str) -> None:
    path = write("scores.jsonl", row("q", "large"), second)

    with pytest.raises(RowError, match=rf"scores\.jsonl, line 2: .*{problem}"):
        read_scores(path, ANSWERS)
