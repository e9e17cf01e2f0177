from __future__ import annotations

import re

import pytest

from app.dataset.prompts import Prompt
from app.dataset.rubric import INSTRUCTIONS, Unparsable, messages, parse


@pytest.mark.parametrize(
    "text",
    [
        '{"scores": {"A": 7.25, "B": 0}}',
        ' \n{"scores": {"B": 0, "A": 7.25}}\n',
        '```json\n{"scores": {"A": 7.25, "B": 0}}\n```',
        '```\n{"scores":\n {"A": 7.25, "B": 0}}```\n',
    ],
)
def test_scores_are_read(text: str) -> None:
    assert parse(text, ["A", "B"]) == {"A": 7.25, "B": 0.0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "empty"),
        (" \n", "empty"),
        ("A is best", "not JSON"),
        ('{"scores": {"A": 7, "B": 0}} since A is best', "not JSON"),
        ('Here: {"scores": {"A": 7, "B": 0}}', "not JSON"),
        ('```json\n{"scores": {"A": 7, "B": 0}}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", 'the one key "scores"'),
        ('{"A": 7, "B": 0}', 'the one key "scores"'),
        ('{"scores": {"A": 7, "B": 0}, "why": "A"}', 'the one key "scores"'),
        ('{"scores": [7, 0]}', "scores is not an object"),
        ('{"scores": {"A": 7}}', "no score of B"),
        ('{"scores": {"a": 7, "B": 0}}', "no score of A"),
        ('{"scores": {"A": 7, "B": 0, "C": 1}}', "there is no answer 'C'"),
        ('{"scores": {"A": 7, "B": 0, "A": 1}}', "'A' is there twice"),
        ('{"scores": {"A": 7, "B": 0}, "scores": {"A": 7, "B": 0}}', "'scores' is there twice"),
        ('{"scores": {"A": "7", "B": 0}}', "of A is not a number"),
        ('{"scores": {"A": true, "B": 0}}', "of A is not a number"),
        ('{"scores": {"A": null, "B": 0}}', "of A is not a number"),
        ('{"scores": {"A": NaN, "B": 0}}', "NaN is not a score"),
        ('{"scores": {"A": 1e999, "B": 0}}', "of A is not from 0 to 10"),
        ('{"scores": {"A": 10.01, "B": 0}}', "of A is not from 0 to 10"),
        ('{"scores": {"A": 7, "B": -0.5}}', "of B is not from 0 to 10"),
        ('{"scores": {"A": 1' + "0" * 400 + ', "B": 0}}', "of A is not from 0 to 10"),
    ],
)
def test_anything_else_is_refused_and_named(text: str | None, problem: str) -> None:
    with pytest.raises(Unparsable, match=problem):
        parse(text, ["A", "B"])


def test_the_judge_is_shown_the_whole_conversation_and_all_answers() -> None:
    chat = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Six times seven?"}]},
    )
    system, user = messages(Prompt("p", chat, None, "42"), {"A": "forty-two", "B": "43"})

    assert system == {"role": "system", "content": INSTRUCTIONS}
    shown = re.sub(r"[0-9a-f]{16}", "MARK", user["content"])
    assert shown.split("\n\n--- ") == [
        "--- PROMPT MARK ---\nsystem: Be brief.\n\nuser: Six times seven?\n--- END MARK ---",
        "REFERENCE MARK ---\n42\n--- END MARK ---",
        "ANSWER A MARK ---\nforty-two\n--- END MARK ---",
        "ANSWER B MARK ---\n43\n--- END MARK ---\n\n"
        "Return the scores of A, B as JSON and nothing else.",
    ]


def test_an_answer_cannot_pose_as_another_part() -> None:
    prompt = Prompt("p", ({"role": "user", "content": "Hi"},), None, None)
    shown = messages(prompt, {"A": "x"})[1]["content"]
    posing = messages(prompt, {"A": shown})[1]["content"]

    assert "REFERENCE" not in shown
    marks = re.findall(r"--- END (\w+) ---", posing)
    assert marks[0] == marks[-1]
    assert marks[1] != marks[0], "what an answer quotes is not this call's mark"


def test_the_scale_has_its_anchors() -> None:
    assert re.findall(r"^(\d+): ", INSTRUCTIONS, re.MULTILINE) == ["10", "8", "6", "4", "2", "0"]
