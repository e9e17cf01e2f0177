from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.cli import app
from app.dataset.answers import read_answers

Serve = Callable[..., AbstractContextManager[Any]]
Write = Callable[..., Path]
Rows = Callable[[Path], list[dict[str, Any]]]

PASSED = "Wed, 21 Oct 2015 07:28:00 GMT"
PAIRS = [("small", "Hi"), ("large", "Hi"), ("small", "Ho"), ("large", "Ho")]


@pytest.fixture
def prompts(write: Write) -> Path:
    return write(
        "prompts.jsonl",
        {"id": "a", "prompt": "Hi", "task": "chat", "reference": "Hello"},
        {"id": "b", "prompt": "Ho"},
        {"id": "again", "prompt": "Hi", "task": "chat", "reference": "Hello"},
    )


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def arguments(server: Any, prompts: Path, output: Path, *more: str) -> list[str]:
    url = server if isinstance(server, str) else server.url
    return ["collect", "--prompts", str(prompts), "--url", url, "-o", str(output), *more]


def collect(server: Any, prompts: Path, output: Path, *more: str) -> Result:
    return CliRunner().invoke(app, arguments(server, prompts, output, *more))


def test_every_model_answers_every_prompt_once(
    serve: Serve, prompts: Path, output: Path, rows: Rows
) -> None:
    with serve() as server:
        result = collect(server, prompts, output, "--max-tokens", "9", "--concurrency", "1")

    assert result.exit_code == 0, result.output
    assert "4 answers of 2 models to 2 prompts; 0 were there" in result.output
    assert "asking: 4 of 4, 0 failed" in result.output, "progress without a terminal"
    assert server.asked == PAIRS, "auto is no model, the prompt that is there twice one prompt"
    assert all(set(body) == {"model", "messages", "max_tokens"} for body in server.bodies)
    assert {body["max_tokens"] for body in server.bodies} == {9}
    assert rows(output)[0] == {
        "prompt_id": "a",
        "messages": [{"role": "user", "content": "Hi"}],
        "task": "chat",
        "reference": "Hello",
        "model": "small",
        "answer": "small on Hi",
        "prompt_tokens": 7,
        "output_tokens": 3,
        "finish_reason": "stop",
        "failure": None,
    }
    assert [(row["model"], row["answer"]) for row in rows(output)] == [
        (model, f"{model} on {prompt}") for model, prompt in PAIRS
    ]


def test_what_is_there_is_not_asked_again(serve: Serve, prompts: Path, output: Path) -> None:
    with serve() as server:
        first = collect(server, prompts, output, "--model", "large")
        second = collect(server, prompts, output)
        third = collect(server, prompts, output)

    assert [r.exit_code for r in (first, second, third)] == [0, 0, 0]
    assert sorted(server.asked) == sorted(PAIRS)
    assert server.asked[:2] == [("large", "Hi"), ("large", "Ho")]
    assert "2 answers of 2 models to 2 prompts; 2 were there" in second.output
    assert "0 answers of 2 models to 2 prompts; 4 were there" in third.output


def test_so_many_are_asked_at_once(serve: Serve, prompts: Path, output: Path) -> None:
    with serve(together=3) as server:
        result = collect(server, prompts, output, "--concurrency", "3")

    assert result.exit_code == 0
    assert server.most_at_once == 3


@pytest.mark.parametrize(
    ("step", "kind", "sentence"),
    [
        (400, "http_400", 'refused with status 400: {"error":{"message":"no instance"}}'),
        ("{", "bad_reply", "not a chat completion: {"),
        ('{"choices": []}', "bad_reply", 'not a chat completion: {"choices": []}'),
        ('{"error": "x"}', "bad_reply", 'not a chat completion: {"error": "x"}'),
        (lambda _: None, "no_text", "an answer without text, finished by stop"),
        ({"retry-after": "3600"}, "http_429", "asks to wait for 3600 s"),
    ],
)
def test_a_failure_is_kept_named_and_asked_again(
    serve: Serve, prompts: Path, output: Path, rows: Rows, step: Any, kind: str, sentence: str
) -> None:
    with serve("ok", step) as server:
        failed = collect(server, prompts, output, "--concurrency", "1")
        kept = rows(output)
        again = collect(server, prompts, output)

    assert failed.exit_code == 1
    assert "3 answers of 2 models to 2 prompts" in failed.output
    assert f"1 failed: {kind}, as in: " in failed.output
    assert [row["failure"] is None for row in kept] == [True, False, True, True]
    assert sentence in kept[1]["failure"]
    assert (kept[1]["model"], kept[1]["answer"]) == ("large", None)
    assert again.exit_code == 0
    assert server.asked == [*PAIRS, ("large", "Hi")], "not retried within the run"
    assert [answer.failure for answer in read_answers(output)] == [None] * 4


@pytest.mark.parametrize(
    "step", [503, 500, "cut", {}, {"retry-after": "soon"}, {"retry-after": PASSED}]
)
def test_what_may_pass_is_retried(serve: Serve, prompts: Path, output: Path, step: Any) -> None:
    with serve(*[step] * 4) as server:
        result = collect(server, prompts, output, "--concurrency", "1")

    assert result.exit_code == 0, result.output
    assert server.asked == [PAIRS[0]] * 4 + PAIRS


@pytest.mark.parametrize(
    ("step", "kind"), [(503, "http_503"), ({}, "http_429"), ("cut", "RemoteProtocolError")]
)
def test_retries_are_bounded(
    serve: Serve, prompts: Path, output: Path, rows: Rows, step: Any, kind: str
) -> None:
    with serve(*[step] * 5) as server:
        result = collect(server, prompts, output, "--concurrency", "1")

    assert result.exit_code == 1
    assert f"1 failed: {kind}" in result.output
    assert server.asked == [PAIRS[0]] * 5 + PAIRS[1:]
    assert rows(output)[0]["failure"].endswith("(attempt 5)")


def test_retry_after_is_honoured(serve: Serve, prompts: Path, output: Path) -> None:
    with serve({"retry-after": "0.3"}) as server:
        result = collect(server, prompts, output, "--concurrency", "1")

    assert result.exit_code == 0
    assert server.at_s[1] - server.at_s[0] >= 0.3


def test_an_answer_has_a_time_limit(
    serve: Serve, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.dataset.endpoint.ATTEMPTS", 2)
    with serve("hang", "hang") as server:
        result = collect(server, prompts, output, "--timeout-s", "1", "--concurrency", "1")

    assert result.exit_code == 1
    assert "1 failed: timeout, as in: no answer within 1 s (attempt 2)" in result.output
    assert server.asked == [PAIRS[0]] * 2 + PAIRS[1:]


def test_a_killed_run_is_taken_up(
    serve: Serve, prompts: Path, output: Path, tmp_path: Path
) -> None:
    with serve("ok", "ok", "hang") as server:
        command = arguments(server, prompts, output, "--concurrency", "1")
        code = "import sys; from app.cli import app; app(sys.argv[1:])"
        run = subprocess.Popen(
            [sys.executable, "-c", code, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert server.hung.wait(60)
            os.kill(run.pid, signal.SIGKILL)
        finally:
            run.kill()
            run.wait()
        assert output.read_text().count("\n") == 2
        with output.open("a") as file:
            file.write('{"prompt_id": "b", "messages": [{"ro')

        result = collect(server, prompts, output)

    assert result.exit_code == 0, result.output
    assert sorted(server.asked) == sorted([*PAIRS, PAIRS[2]])
    assert [answer.text for answer in read_answers(output)].count(None) == 0
    assert len(read_answers(output)) == 4


def test_without_usage_tokens_are_unknown(
    serve: Serve, prompts: Path, output: Path, rows: Rows
) -> None:
    with serve(usage=None) as server:
        assert collect(server, prompts, output).exit_code == 0

    assert {(row["prompt_tokens"], row["output_tokens"]) for row in rows(output)} == {(None, None)}


def test_a_proxy_in_the_environment_is_not_used(
    serve: Serve, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with serve() as server:
        assert collect(server, prompts, output).exit_code == 0


def test_no_server_no_such_model_no_models(serve: Serve, prompts: Path, output: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        absent = collect(f"http://127.0.0.1:{unused.getsockname()[1]}", prompts, output)
    with serve() as server:
        unknown = collect(server, prompts, output, "--model", "huge")
    with serve(models=["auto"]) as empty:
        none = collect(empty, prompts, output)

    assert [r.exit_code for r in (absent, unknown, none)] == [1, 1, 1]
    assert "/v1/models: ConnectError: " in absent.output
    assert "the pool has no huge: it has small, large" in unknown.output
    assert "the pool lists no models" in none.output


def test_an_id_that_named_another_prompt_is_refused(
    serve: Serve, prompts: Path, output: Path, write: Write
) -> None:
    with serve() as server:
        collect(server, prompts, output)
        result = collect(server, write("other.jsonl", {"id": "a", "prompt": "Other"}), output)

    assert result.exit_code == 2
    assert "prompt 'a' was another one when it was asked" in result.output
    assert len(server.bodies) == 4


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--concurrency", "0"], "concurrency must be at least 1"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--timeout-s", "nan"], "timeout_s must be positive"),
        (["--url", "127.0.0.1:8000"], "url"),
        (["--url", "http://"], "url must begin"),
        (["--url", "http://h:x"], "url cannot be read: 'http://h:x'"),
    ],
)
def test_impossible_settings_are_a_usage_error(
    prompts: Path, output: Path, more: list[str], problem: str
) -> None:
    result = collect("http://127.0.0.1:1", prompts, output, *more)

    assert result.exit_code == 2
    assert problem in result.output
    assert not output.exists()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@127.0.0.1:1",
        "http://secret@127.0.0.1:1",
        "http://user:sec/secret@127.0.0.1:1",
        "ftp://user:secret@127.0.0.1:1",
        "user:secret@127.0.0.1:1",
        "127.0.0.1:1/v1?key=secret",
    ],
)
def test_an_address_with_a_password_is_refused_and_not_shown(
    prompts: Path, output: Path, url: str
) -> None:
    result = collect(url, prompts, output)

    assert result.exit_code == 2
    assert "url " in result.output
    assert "sec" not in result.output
    assert not output.exists()


def test_a_query_goes_with_every_call_and_is_not_shown(
    serve: Serve, prompts: Path, output: Path
) -> None:
    query = "api-version=2024-10-21&key=a%2Fb"
    with serve("ok", 401) as server:
        url = f"{server.url}/v1/chat/completions?{query}"
        result = collect(url, prompts, output, "--concurrency", "1")

    assert server.queries == [query] * 3
    assert result.exit_code == 1
    assert f"{server.url}/v1: refused with status 401" in result.output
    assert "key=" not in result.output


def test_an_output_that_cannot_be_made_is_one_line(
    prompts: Path, output: Path, tmp_path: Path
) -> None:
    result = collect("http://127.0.0.1:1", prompts, prompts / "answers.jsonl")

    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert result.stderr.count("\n") == 1
    assert str(prompts) in result.stderr


def test_an_output_that_cannot_grow_is_one_line(
    serve: Serve,
    prompts: Path,
    output: Path,
    file_limit: Callable[[int], AbstractContextManager[None]],
) -> None:
    with serve() as server, file_limit(300):
        result = collect(server, prompts, output, "--concurrency", "1")

    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert result.stderr == f"[Errno 27] File too large: '{output}'\n"
    assert len(read_answers(output)) == 1


def test_a_bad_row_is_a_usage_error(write: Write, output: Path) -> None:
    result = collect("http://127.0.0.1:1", write("prompts.jsonl", {"task": "chat"}), output)

    assert result.exit_code == 2
    assert "prompts.jsonl, line 1: " in result.output
