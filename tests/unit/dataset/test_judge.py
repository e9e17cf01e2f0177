from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from app.dataset.answers import Answer, read_answers
from app.dataset.panel import Panel
from app.dataset.prompts import Prompt
from app.dataset.scores import read_scores

Serve = Callable[..., AbstractContextManager[Any]]
Write = Callable[..., Path]
Rows = Callable[[Path], list[dict[str, Any]]]

MODELS = ("granite", "mistral", "qwen3")
WORTH = {"granite": 2.5, "mistral": 9.0, "qwen3": 6.0}


def row(prompt_id: str, model: str, worth: float | None = None, **changes: Any) -> dict[str, Any]:
    """An answer that says what it is worth, so that a scripted judge knows."""
    return {
        "prompt_id": prompt_id,
        "messages": [{"role": "user", "content": f"question {prompt_id}"}],
        "reference": f"truth of {prompt_id}",
        "model": model,
        "answer": f"worth {WORTH[model] if worth is None else worth}",
        "failure": None,
        **changes,
    }


def failed(prompt_id: str, model: str) -> dict[str, Any]:
    return row(prompt_id, model, answer=None, failure="cut")


def shown(body: dict[str, Any]) -> dict[str, str]:
    """Answers by letter, as the judge sees them."""
    return dict(
        re.findall(r"--- ANSWER (\w+) \w+ ---\n(.*)\n--- END", body["messages"][1]["content"])
    )


def fair(body: dict[str, Any]) -> str:
    scores = {letter: float(text.removeprefix("worth ")) for letter, text in shown(body).items()}
    return json.dumps({"scores": scores})


def says(text: str) -> Callable[[dict[str, Any]], str]:
    return lambda _: text


@pytest.fixture
def answers(write: Write) -> Path:
    return write("answers.jsonl", *[row(p, model) for p in ("a", "b") for model in MODELS])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "scores.jsonl"


@pytest.fixture
def judging(serve: Serve) -> Callable[..., AbstractContextManager[Any]]:
    def judging(*steps: Any, **changes: Any) -> AbstractContextManager[Any]:
        return serve(*steps, **{"says": fair, **changes})

    return judging


def judge(server: Any, answers: Path, output: Path, *more: str) -> Result:
    url = server if isinstance(server, str) else server.url
    command = ["judge", str(answers), "--endpoint", url, "--judge-model", "arbiter"]
    return CliRunner().invoke(app, [*command, "-o", str(output), *more])


PRICES = ("--price-in-usd-per-mtok", "1000", "--price-out-usd-per-mtok", "2000")


def test_scores_go_to_the_models_whose_answers_they_are(
    judging: Serve, answers: Path, output: Path, rows: Rows
) -> None:
    with judging() as server:
        result = judge(server, answers, output, *PRICES, "--concurrency", "1")

    assert result.exit_code == 0, result.output
    assert "2 prompts judged; 0 were; 0 have no answer to judge" in result.output
    assert "cost_usd 0.026000, of the whole file 0.026000" in result.output
    assert "judging: 2 of 2, 0 failed" in result.output
    scores = read_scores(output, read_answers(answers))
    assert {score.key: score.score for score in scores} == {
        (prompt_id, model): WORTH[model] / 10 for prompt_id in "ab" for model in MODELS
    }
    first, second, *_ = rows(output)
    assert (first["judge_prompt_tokens"], first["judge_output_tokens"]) == (7, 3)
    assert first["judge_cost_usd"] == pytest.approx(0.013)
    assert second == {
        "prompt_id": "a",
        "model": second["model"],
        "score": WORTH[second["model"]] / 10,
        "judge_model": "arbiter",
        "answer_hash": second["answer_hash"],
        "judge_prompt_tokens": None,
        "judge_output_tokens": None,
        "judge_cost_usd": None,
        "failure": None,
    }


def test_the_judge_is_told_all_but_whose_the_answers_are(
    judging: Serve, answers: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret\n")
    with judging() as server:
        result = judge(server, answers, output, "--api-key-env", "JUDGE_KEY", "--concurrency", "1")

    assert result.exit_code == 0
    for prompt_id, body, headers in zip("ab", server.bodies, server.headers, strict=True):
        text = json.dumps([body, headers])
        assert set(body) == {"model", "messages"}
        assert body["model"] == "arbiter"
        assert f"question {prompt_id}" in text and f"truth of {prompt_id}" in text
        assert sorted(shown(body)) == ["A", "B", "C"]
        assert set(shown(body).values()) == {f"worth {WORTH[model]}" for model in MODELS}
        assert not [model for model in MODELS if model in text]
        assert headers["authorization"] == "Bearer secret"
    assert "secret" not in output.read_text() + result.output


def test_no_key_no_header(judging: Serve, answers: Path, output: Path) -> None:
    with judging() as server:
        judge(server, answers, output)

    assert all("authorization" not in headers for headers in server.headers)


def test_seed_and_prompt_decide_the_order() -> None:
    def order(prompt_id: str, seed: int) -> tuple[str, ...]:
        prompt = Prompt(prompt_id, (), None, None)
        panel = Panel(prompt, [Answer(prompt, m, "", None, None, None, None) for m in MODELS])
        return tuple(answer.model for answer in panel.lettered(seed).values())

    assert [order(p, 1) for p in "abcd"] == [order(p, 1) for p in "abcd"]
    orders = [order(str(i), 1) for i in range(600)]
    assert len(set(orders)) == 6
    assert min(map(orders.count, set(orders))) > 60, "each model is as often A"
    assert orders != [order(str(i), 2) for i in range(600)]
    assert order("a", 1) == ("granite", "qwen3", "mistral"), "in every process"


def test_failed_answers_are_not_judged(judging: Serve, write: Write, output: Path) -> None:
    answers = write(
        "answers.jsonl",
        row("a", "qwen3"),
        failed("a", "granite"),
        failed("b", "qwen3"),
        row("c", "granite", answer=""),
    )
    with judging(fair, says('{"scores": {"A": 0}}')) as server:
        result = judge(server, answers, output, "--concurrency", "1")

    assert result.exit_code == 0
    assert "2 prompts judged; 0 were; 1 have no answer to judge" in result.output
    assert [list(shown(body)) for body in server.bodies] == [["A"], ["A"]]
    assert [s.key for s in read_scores(output)] == [("a", "qwen3"), ("c", "granite")]


def test_nothing_is_judged_twice(judging: Serve, answers: Path, output: Path) -> None:
    with judging() as server:
        judge(server, answers, output, *PRICES)
        result = judge(server, answers, output, *PRICES)

    assert result.exit_code == 0
    assert len(server.bodies) == 2
    assert "0 prompts judged; 2 were" in result.output
    assert "cost_usd 0.000000, of the whole file 0.026000" in result.output


def test_a_new_answer_has_its_prompt_judged_anew(
    judging: Serve, write: Write, output: Path
) -> None:
    some = [row("a", "qwen3"), row("a", "granite"), row("b", "qwen3"), failed("b", "granite")]
    with judging(says('{"scores": {"A": 1, "B": 1}}')) as server:
        judge(server, write("answers.jsonl", *some), output, "--concurrency", "1")
        answers = write("answers.jsonl", *some, row("a", "mistral"))
        result = judge(server, answers, output)

    assert "1 prompts judged; 1 were" in result.output
    assert [len(shown(body)) for body in server.bodies] == [2, 1, 3]
    assert {s.key: s.score for s in read_scores(output, read_answers(answers))} == {
        ("a", "granite"): 0.25,
        ("a", "mistral"): 0.9,
        ("a", "qwen3"): 0.6,
        ("b", "qwen3"): 0.6,
    }


def test_an_answer_that_is_not_the_one_that_was_judged_is_judged(
    judging: Serve, write: Write, output: Path
) -> None:
    with judging() as server:
        judge(server, write("answers.jsonl", row("a", "qwen3")), output)
        answers = write("answers.jsonl", row("a", "qwen3", worth=1.0))
        judge(server, answers, output)

    assert [s.score for s in read_scores(output, read_answers(answers))] == [0.1]


def test_a_torn_verdict_is_asked_again(judging: Serve, answers: Path, output: Path) -> None:
    with judging() as server:
        judge(server, answers, output, "--concurrency", "1")
        whole = output.read_text()
        output.write_text(whole[:-40])
        result = judge(server, answers, output)

    assert result.exit_code == 0, result.output
    assert "1 prompts judged; 1 were" in result.output
    assert [len(server.bodies), "question b" in json.dumps(server.bodies[2])] == [3, True]
    assert len(read_scores(output, read_answers(answers))) == 6


@pytest.mark.parametrize(
    "reply",
    [
        "A is best",
        '{"A": 1, "B": 2, "C": 3}',
        '{"scores": {"A": 1, "B": 2}}',
        '{"scores": {"A": 1, "B": 2, "C": 3, "D": 4}}',
        '{"scores": {"A": 1, "B": 2, "C": 11}}',
        '{"scores": {"A": 1, "B": 2, "C": NaN}}',
        '{"scores": {"A": 1, "A": 2, "B": 2, "C": 3}}',
        "",
    ],
)
def test_what_cannot_be_read_is_asked_for_again_with_the_problem_named(
    judging: Serve, answers: Path, output: Path, rows: Rows, reply: str
) -> None:
    with judging(says(reply), says(reply)) as server:
        result = judge(server, answers, output, *PRICES, "--concurrency", "1")

    assert result.exit_code == 0, result.output
    assert [len(body["messages"]) for body in server.bodies] == [2, 4, 6, 2]
    returned, problem = server.bodies[1]["messages"][2:]
    assert returned == {"role": "assistant", "content": reply or "(nothing)"}
    assert problem["content"].startswith("That cannot be used: ")
    assert len(read_scores(output, read_answers(answers))) == 6
    assert rows(output)[0]["judge_cost_usd"] == pytest.approx(3 * 0.013)
    assert rows(output)[0]["judge_output_tokens"] == 9


def test_what_cannot_be_read_in_the_end_is_kept_as_failed_and_judged_by_the_next_run(
    judging: Serve, answers: Path, output: Path, rows: Rows
) -> None:
    with judging(*[says("no")] * 2) as server:
        first = judge(server, answers, output, *PRICES, "--reasks", "1", "--concurrency", "1")
        kept = rows(output)
        second = judge(server, answers, output, *PRICES)

    assert first.exit_code == 1
    assert "1 prompts judged" in first.output
    assert "1 failed: unparsable, as in: no sound scores, asked 2 times; at last: " in first.output
    assert (kept[0]["prompt_id"], kept[0]["model"], kept[0]["score"]) == ("a", None, None)
    assert "it is not JSON" in kept[0]["failure"]
    assert kept[0]["judge_cost_usd"] == pytest.approx(0.026)
    assert second.exit_code == 0
    assert "1 prompts judged; 1 were" in second.output
    assert "cost_usd 0.013000, of the whole file 0.052000" in second.output
    assert len(read_scores(output, read_answers(answers))) == 6


@pytest.mark.parametrize("step", [503, 500, "cut", "hang", {"retry-after": "0"}])
def test_what_may_pass_is_retried(judging: Serve, answers: Path, output: Path, step: Any) -> None:
    with judging(step) as server:
        result = judge(server, answers, output, "--timeout-s", "1", "--concurrency", "1")

    assert result.exit_code == 0, result.output
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[1]


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (503, "http_503"),
        ({"retry-after": "0"}, "http_429"),
        ("cut", "RemoteProtocolError"),
        ("hang", "timeout"),
        (400, "http_400"),
        ('{"choices": [{}]}', "bad_reply"),
    ],
)
def test_a_call_that_fails_is_kept_and_nothing_is_lost(
    judging: Serve,
    answers: Path,
    output: Path,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    step: Any,
    kind: str,
) -> None:
    monkeypatch.setattr("app.dataset.endpoint.ATTEMPTS", 2)
    with judging(step, step) as server:
        more = ("--timeout-s", "1", "--concurrency", "1")
        first = judge(server, answers, output, *more)
        failures = [row["failure"] for row in rows(output)]
        second = judge(server, answers, output)

    assert first.exit_code == 1
    assert f" failed: {kind}, as in: " in first.output
    assert failures[0] is not None
    assert second.exit_code == 0
    assert len(read_scores(output, read_answers(answers))) == 6


def test_nothing_is_asked_beyond_the_budget(judging: Serve, write: Write, output: Path) -> None:
    answers = write("answers.jsonl", *[row(str(i), "qwen3") for i in range(10)])
    # A call is expected to cost at least 500 · 2000 micro-dollars for what the judge writes, 1 USD.
    usage = {"prompt_tokens": 500, "completion_tokens": 250}
    with judging(usage=usage) as server:
        first = judge(server, answers, output, *PRICES, "--budget-usd", "4.5")
        asked = len(server.bodies)
        second = judge(server, answers, output, *PRICES, "--budget-usd", "4.5")
        assert len(server.bodies) == asked, "earlier runs count"
        third = judge(server, answers, output, *PRICES, "--budget-usd", "100")

    assert (first.exit_code, second.exit_code, third.exit_code) == (3, 3, 0)
    assert 1 <= asked <= 4
    assert f"{asked} prompts judged" in first.output
    assert f"the budget of 4.5 USD is reached: {10 - asked} prompts not judged" in first.output
    assert f"of the whole file {asked:.6f}" in first.output
    assert len(server.bodies) == 10
    assert len(read_scores(output, read_answers(answers))) == 10


def test_the_budget_also_limits_asking_again(
    judging: Serve, write: Write, output: Path, rows: Rows
) -> None:
    answers = write("answers.jsonl", row("a", "qwen3"))
    usage = {"prompt_tokens": 500, "completion_tokens": 750}
    with judging(says("no"), usage=usage) as server:
        result = judge(server, answers, output, *PRICES, "--budget-usd", "3")

    assert result.exit_code == 3
    assert len(server.bodies) == 1
    assert rows(output)[0]["failure"].endswith("the budget did not suffice to ask again")
    assert rows(output)[0]["judge_cost_usd"] == pytest.approx(2.0)


def test_without_usage_a_call_costs_what_was_expected(
    judging: Serve, write: Write, output: Path, rows: Rows
) -> None:
    with judging(usage=None) as server:
        judge(server, write("answers.jsonl", row("a", "qwen3")), output, *PRICES)

    (scored,) = rows(output)
    assert scored["judge_prompt_tokens"] is None
    assert 1.0 < scored["judge_cost_usd"] < 3.0


FREE_IN = ("--price-in-usd-per-mtok", "0", "--price-out-usd-per-mtok", "2000")
"""A call is expected to cost 1 USD, whatever it says, and one that is answered costs 0.006."""


@pytest.mark.parametrize(
    ("steps", "cost_usd"),
    [
        (("cut",), 1.006),
        (("hang",), 1.006),
        (("cut", "cut", "cut"), 3.0),
        (("hang", "cut", 503), 2.0),
        (('{"choices": [{}]}',), 1.0),
        (("cut", 400), 1.0),
        ((503, {"retry-after": "0"}), 0.006),
        ((400,), None),
    ],
)
def test_what_was_sent_and_not_refused_costs_what_was_expected(
    judging: Serve,
    write: Write,
    output: Path,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[Any, ...],
    cost_usd: float | None,
) -> None:
    monkeypatch.setattr("app.dataset.endpoint.ATTEMPTS", 3)
    answers = write("answers.jsonl", row("a", "qwen3"))
    with judging(*steps) as server:
        result = judge(server, answers, output, *FREE_IN, "--timeout-s", "1")

    assert f"cost_usd {cost_usd or 0:.6f}, of the whole file {cost_usd or 0:.6f}" in result.output
    assert rows(output)[0]["judge_cost_usd"] == pytest.approx(cost_usd)


def test_a_judge_that_is_not_reached_costs_nothing(write: Write, output: Path, rows: Rows) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = judge(url, write("answers.jsonl", row("a", "qwen3")), output, *FREE_IN)

    assert "1 failed: ConnectError" in result.output
    assert "cost_usd 0.000000, of the whole file 0.000000" in result.output
    assert rows(output)[0]["judge_cost_usd"] is None


def test_the_budget_also_limits_attempts_and_a_resumed_run_counts_them(
    judging: Serve, write: Write, output: Path, rows: Rows
) -> None:
    answers = write("answers.jsonl", row("a", "qwen3"))
    budget = (*FREE_IN, "--budget-usd", "2.5")
    with judging(*["cut"] * 5) as server:
        first = judge(server, answers, output, *budget)
        second = judge(server, answers, output, *budget)

    assert (first.exit_code, second.exit_code) == (3, 3)
    assert len(server.bodies) == 2
    (kept,) = rows(output)
    assert kept["failure"].startswith("RemoteProtocolError: ")
    assert kept["failure"].endswith("; the budget did not suffice to ask again")
    assert kept["judge_cost_usd"] == pytest.approx(2.0)
    assert "cost_usd 0.000000, of the whole file 2.000000" in second.output


def test_without_prices_no_cost(judging: Serve, answers: Path, output: Path, rows: Rows) -> None:
    with judging() as server:
        result = judge(server, answers, output)

    assert "cost_usd null, of the whole file null" in result.output
    assert {row["judge_cost_usd"] for row in rows(output)} == {None}


def test_a_refused_key_ends_the_run(judging: Serve, answers: Path, output: Path) -> None:
    with judging(401) as server:
        result = judge(server, answers, output, "--concurrency", "1")

    assert result.exit_code == 1
    assert "refused with status 401" in result.output
    assert len(server.bodies) == 1
    assert output.read_text() == ""


@pytest.fixture
def many(write: Write) -> Path:
    return write("answers.jsonl", *[row(str(i), "qwen3") for i in range(6)])


def refused(status: int, reason: str, request_id: int) -> tuple[int, str]:
    return status, json.dumps({"error": {"message": reason}, "request_id": request_id})


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_judge_that_refuses_the_first_calls_alike_ends_the_run(
    judging: Serve, many: Path, output: Path, status: int
) -> None:
    steps = [refused(status, "temperature must be 1", i) for i in range(6)]
    with judging(*steps) as server:
        result = judge(server, many, output, "--concurrency", "1")

    assert result.exit_code == 1
    assert result.stderr.endswith(
        f"all of the first 3 calls: refused with status {status}: {steps[2][1]}\n"
    )
    assert len(server.bodies) == 3
    assert output.read_text() == ""


def test_nothing_is_kept_of_calls_that_were_under_way_when_the_run_ended(
    judging: Serve, many: Path, output: Path
) -> None:
    with judging(*[400] * 6, together=4) as server:
        result = judge(server, many, output)

    assert result.exit_code == 1
    assert "all of the first 3 calls: refused with status 400" in result.stderr
    assert output.read_text() == ""


@pytest.mark.parametrize(
    "steps",
    [
        (400, 400, "ok", 400, 400, 400),
        (400, 400, 404, 400, 400, 400),
        (400, 400, refused(400, "too long", 1), 400, 400, 400),
        (400, 400, '{"choices": []}', 400, 400, 400),
        ({"retry-after": "999"},) * 6,
        (501,) * 6,
    ],
)
def test_other_openings_do_not_end_the_run(
    judging: Serve,
    many: Path,
    output: Path,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[Any, ...],
) -> None:
    monkeypatch.setattr("app.dataset.endpoint.ATTEMPTS", 1)
    with judging(*steps) as server:
        result = judge(server, many, output, "--concurrency", "1")

    assert result.exit_code == 1
    assert len(server.bodies) == 6
    assert [row["prompt_id"] for row in rows(output)] == list("012345")


def test_as_many_refusals_as_prompts_but_too_few_to_end_the_run_are_kept(
    judging: Serve, answers: Path, output: Path, rows: Rows
) -> None:
    with judging(400, 400) as server:
        assert judge(server, answers, output).exit_code == 1

    assert [row["prompt_id"] for row in rows(output)] == ["a", "b"]


def test_a_file_holds_the_scores_of_one_judge(judging: Serve, answers: Path, output: Path) -> None:
    with judging() as server:
        judge(server, answers, output)
        result = judge(server, answers, output, "--judge-model", "other")

    assert result.exit_code == 2
    assert "line 1: is of arbiter: a file holds the scores of one judge" in result.output
    assert len(server.bodies) == 2


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_endpoint_is_a_server_its_api_or_its_chat_completions(
    judging: Serve, answers: Path, output: Path, path: str
) -> None:
    with judging() as server:
        assert judge(server.url + path, answers, output).exit_code == 0


def test_more_fields_of_the_body(judging: Serve, answers: Path, output: Path) -> None:
    with judging() as server:
        judge(server, answers, output, "--fields", '{"temperature": 0, "model": "mine"}')

    assert {(b["temperature"], b["model"]) for b in server.bodies} == {(0, "arbiter")}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--budget-usd", "1"], "a budget needs prices"),
        ([*PRICES, "--budget-usd", "nan"], "budget_usd must be finite"),
        (["--price-in-usd-per-mtok", "1"], "needs one of tokens out"),
        (["--price-in-usd-per-mtok", "nan", "--price-out-usd-per-mtok", "1"], "must be finite"),
        (["--concurrency", "0"], "concurrency must be at least 1"),
        (["--reasks", "-1"], "reasks must be at least 0"),
        (["--timeout-s", "0"], "timeout_s must be positive"),
        (["--fields", "[1]"], "fields: is list"),
        (["--endpoint", "localhost"], "url must begin"),
        (["--endpoint", "https://user:secret@localhost"], "url must not hold a user or a password"),
    ],
)
def test_impossible_settings_are_a_usage_error(
    answers: Path, output: Path, more: list[str], problem: str
) -> None:
    result = judge("http://127.0.0.1:1", answers, output, *more)

    assert result.exit_code == 2
    assert problem in result.output
    assert not output.exists()


def test_an_output_that_cannot_be_made_is_one_line(answers: Path) -> None:
    result = judge("http://127.0.0.1:1", answers, answers / "scores.jsonl")

    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert result.stderr.count("\n") == 1
    assert str(answers) in result.stderr


def test_more_answers_than_letters_are_refused(write: Write, output: Path) -> None:
    answers = write("answers.jsonl", *[row("a", f"m{i}", worth=1) for i in range(27)])

    result = judge("http://127.0.0.1:1", answers, output)

    assert result.exit_code == 2
    assert "prompt 'a' has 27 answers: at most 26" in result.output
