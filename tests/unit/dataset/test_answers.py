from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.dataset.answers import read_answers
from app.rows import RowError

Write = Callable[..., Path]


def row(prompt_id: str = "p", model: str = "small", **changes: Any) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id,
        "messages": [{"role": "user", "content": f"prompt {prompt_id}"}],
        "task": None,
        "reference": None,
        "model": model,
        "answer": "yes",
        "prompt_tokens": 7,
        "output_tokens": 3,
        "finish_reason": "stop",
        "failure": None,
        **changes,
    }


def failed(prompt_id: str = "p", model: str = "small", why: str = "cut") -> dict[str, Any]:
    return row(prompt_id, model, answer=None, failure=why)


def test_what_is_written_reads_as_it_was(write: Write) -> None:
    path = write("answers.jsonl", row(extra="tolerated"), failed(model="large"))

    answers = read_answers(path)

    assert [answer.row() for answer in answers] == [
        {**row(), "messages": tuple(row()["messages"])},
        {**failed(model="large"), "messages": tuple(row()["messages"])},
    ]
    assert answers[0].prompt is answers[1].prompt


def test_an_answer_stands_over_failures_and_the_newest_failure_over_earlier_ones(
    write: Write,
) -> None:
    path = write(
        "answers.jsonl",
        failed(why="first"),
        failed("q", why="first"),
        row(),
        failed("q", why="second"),
        failed(why="third"),
        row(),
    )

    assert [(a.key, a.text, a.failure) for a in read_answers(path)] == [
        (("p", "small"), "yes", None),
        (("q", "small"), None, "second"),
    ]


def test_a_torn_last_line_was_never_written(write: Write) -> None:
    assert len(read_answers(write("answers.jsonl", row(), '{"prompt_id": "q", "mes'))) == 1


def test_an_empty_answer_is_one(write: Write) -> None:
    assert read_answers(write("answers.jsonl", row(answer="")))[0].text == ""


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (row("q", answer=None), "either answer, a text, or failure"),
        (row("q", failure="but answered"), "either answer, a text, or failure"),
        ({"prompt_id": "q", "model": "small", "answer": "yes"}, "messages: "),
        (row("q", answer=["yes"]), "answer: "),
        (row("q", answer="\ud800"), "lone surrogate"),
        (row("q", model=""), "model: "),
        (row("q", messages=[{"role": "user"}]), r"messages\[0\]\.content"),
        (row("q", output_tokens=-1), "output_tokens: "),
        (row(answer="no"), "another answer of small to prompt 'p' than in line 1"),
        (row(output_tokens=4), "small to prompt 'p' has output_tokens 4 here and 3 in line 1"),
        (row(output_tokens=None), "has output_tokens null here and 3 in line 1"),
        (row(reference="no"), r"prompt 'p' has other reference than in .*, line 1"),
        ('{"prompt_id": "q", "output_tokens": Infinity}\n', "Infinity is not JSON"),
        ('{"prompt_id"\n', "delimiter"),
    ],
)
def test_an_error_names_file_and_line(write: Write, second: Any, problem: str) -> None:
    with pytest.raises(RowError, match=rf"answers\.jsonl, line 2: .*{problem}"):
        read_answers(write("answers.jsonl", row(), second))
