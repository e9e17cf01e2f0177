"""The emulated pool through its doors: HTTP, the ``openai`` client, the Serve handle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from served_pool import ROOT, SERVE, Server, running, until

from app.records import read_records
from deployments.openai_protocol import ApiError
from sfs_ext import Snapshot, SnapshotReader

HELLO = {"role": "user", "content": "Say hello."}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [HELLO], **fields}


def chunks(text: str) -> list[dict[str, Any]]:
    """A stream's events, which must end with ``[DONE]``."""
    events = text.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def kill(instance_id: str) -> None:
    os.kill(SnapshotReader(f"/dev/shm/foretoken-{instance_id}").writer_pid, signal.SIGKILL)


def contents(stream: list[dict[str, Any]]) -> list[str]:
    deltas = [chunk["choices"][0]["delta"] for chunk in stream if chunk["choices"]]
    return [delta["content"] for delta in deltas if delta.get("content")]


class TestAnswers:
    def test_models_are_the_pools_and_auto(self, client: httpx.Client) -> None:
        listed = client.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == ["small", "large", "auto"]

    def test_whole_chat_completion(self, client: httpx.Client) -> None:
        response = client.post("/v1/chat/completions", json=chat(max_tokens=7, ignore_eos=True))
        answer = response.json()
        assert response.status_code == 200
        assert answer["object"] == "chat.completion"
        assert answer["model"] == response.headers["x-foretoken-model"] == "large"
        assert response.headers["x-foretoken-instance"].startswith("large-")
        assert response.headers["x-foretoken-decision-id"].startswith("dec-")
        assert 10 < float(response.headers["x-foretoken-predicted-ttft-ms"]) < 2000
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert len(choice["message"]["content"].split()) == 7
        assert answer["usage"]["completion_tokens"] == 7

    def test_streamed_chat_completion(self, client: httpx.Client) -> None:
        body = chat(
            model="small",
            stream=True,
            max_completion_tokens=9,
            ignore_eos=True,
            stream_options={"include_usage": True},
        )
        response = client.post("/v1/chat/completions", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = chunks(response.text)
        assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len(contents(stream)) == 9
        assert stream[-2]["choices"][0]["finish_reason"] == "length"
        assert stream[-1]["choices"] == []
        assert stream[-1]["usage"]["completion_tokens"] == 9

    def test_text_completions(self, client: httpx.Client) -> None:
        body = {"model": "small", "prompt": "Once", "max_tokens": 5, "ignore_eos": True}
        whole = client.post("/v1/completions", json=body).json()
        assert whole["object"] == "text_completion"
        assert len(whole["choices"][0]["text"].split()) == 5
        stream = chunks(client.post("/v1/completions", json={**body, "stream": True}).text)
        texts = [chunk["choices"][0]["text"] for chunk in stream]
        assert len([text for text in texts if text]) == 5
        assert "".join(texts) == whole["choices"][0]["text"]
        assert stream[-1]["choices"][0]["finish_reason"] == "length"

    def test_an_answer_stops_of_itself_at_lengths_that_vary(self, client: httpx.Client) -> None:
        answers = [client.post("/v1/chat/completions", json=chat()).json() for _ in range(4)]
        assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
        assert len({answer["usage"]["completion_tokens"] for answer in answers}) > 1

    def test_openai_client(self, server: Server) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="auto",
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=6,
                stream=True,
                extra_body={"ignore_eos": True, "routing": {"ttft_slo_ms": 900}},
            )
            texts = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
            assert len([text for text in texts if text]) == 6
            with pytest.raises(openai.NotFoundError, match="small, large"):
                client.chat.completions.create(
                    model="gpt-17", messages=[{"role": "user", "content": "Hello"}]
                )

    def test_200_concurrent_streams_each_whole(self, server: Server) -> None:
        async def one(client: httpx.AsyncClient, tokens: int) -> tuple[int, int, str]:
            body = chat(
                stream=True,
                max_tokens=tokens,
                ignore_eos=True,
                stream_options={"include_usage": True},
                messages=[{"role": "user", "content": f"Request {tokens}. " + "word " * 50}],
            )
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            stream = chunks(response.text)
            counted: int = stream[-1]["usage"]["completion_tokens"]
            return len(contents(stream)), counted, response.headers["x-foretoken-instance"]

        async def all_at_once() -> list[tuple[int, int, str]]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
                return await asyncio.gather(*(one(client, tokens) for tokens in lengths))

        lengths = [10 + i % 60 for i in range(200)]
        results = asyncio.run(all_at_once())
        assert [seen for seen, _, _ in results] == lengths
        assert [counted for _, counted, _ in results] == lengths
        instances = {instance for _, _, instance in results}
        assert all(until(lambda i=i: running(i) == 0, 5) for i in instances)


class TestRouting:
    def test_route_explains_without_running(self, client: httpx.Client) -> None:
        decision = client.post("/v1/route", json=chat(routing={"ttft_slo_ms": 700})).json()
        assert decision["ttft_slo_ms"] == 700
        assert decision["instance"] in decision["reason"]
        assert sorted(c["model"] for c in decision["candidates"]) == ["large", "small", "small"]
        for candidate in decision["candidates"]:
            total = candidate["waiting_ms"] + candidate["prefill_ms"]
            assert candidate["predicted_ttft_ms"] == pytest.approx(total, abs=0.01)
            assert candidate["estimator"] == "sfs"
            assert candidate["feasible"] == (candidate["predicted_ttft_ms"] <= 700)
            assert running(candidate["instance"]) == 0

    def test_a_models_name_keeps_the_model(self, client: httpx.Client) -> None:
        decision = client.post("/v1/route", json=chat(model="small")).json()
        assert {candidate["model"] for candidate in decision["candidates"]} == {"small"}
        assert len(decision["candidates"]) == 2

    def test_round_robin_reaches_every_instance(self, client: httpx.Client) -> None:
        body = chat(max_tokens=1, routing={"policy": "round_robin"})
        answers = [client.post("/v1/chat/completions", json=body) for _ in range(3)]
        assert len({answer.headers["x-foretoken-instance"] for answer in answers}) == 3

    @pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms"])
    def test_target_from_header(self, client: httpx.Client, header: str) -> None:
        decision = client.post("/v1/route", json=chat(), headers={header: "321.5"}).json()
        assert decision["ttft_slo_ms"] == 321.5

    def test_body_beats_header(self, client: httpx.Client) -> None:
        body = chat(routing={"ttft_slo_ms": 50, "lambda": 0.25, "delta": 3})
        decision = client.post("/v1/route", json=body, headers={"x-slo-ttft-ms": "900"}).json()
        assert (decision["ttft_slo_ms"], decision["lambda"], decision["delta"]) == (50, 0.25, 3)

    def test_a_prompt_too_long_for_some_goes_to_the_others(self, client: httpx.Client) -> None:
        body = chat(messages=[{"role": "user", "content": "word " * 3000}])
        decision = client.post("/v1/route", json=body).json()
        assert [candidate["model"] for candidate in decision["candidates"]] == ["large"]


LONG = [{"role": "user", "content": "word " * 7000}]
NO_OBJECTS = [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"null", b"[" * 100_000, b"1" * 5000]
BAD = {
    "no messages": (chat(messages=[]), 400, "messages"),
    "messages missing": ({"model": "auto"}, 400, "messages"),
    "a message without content": (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    "an unknown role": (chat(messages=[{**HELLO, "role": "oracle"}]), 400, "messages[0].role"),
    "unknown model": (chat(model="gpt-17"), 404, "model"),
    "model missing": ({"messages": [HELLO]}, 400, "model"),
    "unknown policy": (chat(routing={"policy": "hope"}), 400, "routing.policy"),
    "unknown routing key": (chat(routing={"ttft_slo": 5}), 400, "routing.ttft_slo"),
    "negative target": (chat(routing={"ttft_slo_ms": -5}), 400, "routing.ttft_slo_ms"),
    "target as text": (chat(routing={"ttft_slo_ms": "5"}), 400, "routing.ttft_slo_ms"),
    "target as bool": (chat(routing={"ttft_slo_ms": True}), 400, "routing.ttft_slo_ms"),
    "negative lambda": (chat(routing={"lambda": -1}), 400, "routing.lambda"),
    "max_tokens zero": (chat(max_tokens=0), 400, "max_tokens"),
    "max_tokens as text": (chat(max_tokens="many"), 400, "max_tokens"),
    "max_tokens too many": (chat(max_tokens=6001), 400, "max_tokens"),
    "max_completion_tokens too many": (
        chat(max_completion_tokens=10**9),
        400,
        "max_completion_tokens",
    ),
    "prompt longer than every context": (chat(messages=LONG), 400, "messages"),
    "several answers": (chat(n=2), 400, "n"),
    "stop": (chat(stop=["."]), 400, "stop"),
    "min_tokens above max_tokens": (chat(max_tokens=3, min_tokens=4), 400, "min_tokens"),
    "logprobs": (chat(logprobs=True), 400, "logprobs"),
    "tools": (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
}


class TestBadInput:
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    @pytest.mark.parametrize(("body", "status", "param"), BAD.values(), ids=BAD)
    def test_is_refused_by_name(
        self, client: httpx.Client, body: dict[str, Any], status: int, param: str, stream: bool
    ) -> None:
        response = client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["message"]

    def test_stream_options_need_a_stream(self, client: httpx.Client) -> None:
        body = chat(stream_options={"include_usage": True})
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stream_options"

    def test_the_limit_is_named(self, client: httpx.Client) -> None:
        response = client.post("/v1/chat/completions", json=chat(messages=LONG))
        assert "6000" in response.json()["error"]["message"]

    @pytest.mark.parametrize("target", ["-1", "0", "nan", "inf", "soon", ""])
    def test_target_in_header(self, client: httpx.Client, target: str) -> None:
        response = client.post(
            "/v1/chat/completions", json=chat(), headers={"x-slo-ttft-ms": target}
        )
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-slo-ttft-ms"

    @pytest.mark.parametrize("target", ["NaN", "Infinity"])
    def test_target_that_json_does_not_know(self, client: httpx.Client, target: str) -> None:
        body = json.dumps(chat(routing={"ttft_slo_ms": "X"})).replace('"X"', target)
        response = client.post("/v1/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "routing.ttft_slo_ms"

    @pytest.mark.parametrize("body", NO_OBJECTS, ids=lambda body: repr(body[:12]))
    def test_body_that_is_no_object(self, client: httpx.Client, body: bytes) -> None:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/route"):
            response = client.post(path, content=body)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [1, 2], None])
    def test_prompts(self, client: httpx.Client, prompt: Any) -> None:
        response = client.post("/v1/completions", json={"model": "auto", "prompt": prompt})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"

    def test_paths_and_methods(self, client: httpx.Client) -> None:
        assert client.get("/v1/nothing").status_code == 404
        assert "/v1/nothing" in client.get("/v1/nothing").json()["error"]["message"]
        assert client.get("/v1/chat/completions").status_code == 405
        assert "GET" in client.get("/v1/chat/completions").json()["error"]["message"]

    def test_nothing_is_left_running(self, client: httpx.Client) -> None:
        decision = client.post("/v1/route", json=chat()).json()
        assert all(running(candidate["instance"]) == 0 for candidate in decision["candidates"])

    def test_a_bad_settings_file_is_refused_at_start(self, tmp_path: Path) -> None:
        pool = tmp_path / "bad.yaml"
        text = (ROOT / "tests/integration/pool.yaml").read_text()
        pool.write_text(text.replace("ttft_slo_ms: 2000", "ttft_slo: 2000"))
        command = [str(SERVE), "run", "--address", "local", "deployments.build:build"]
        result = subprocess.run(
            [*command, f"pool={pool}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode != 0
        assert f"{pool}: router.ttft_slo" in result.stderr
        assert "ttft_slo_ms" in result.stderr


class TestDisconnect:
    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    def test_frees_the_slot_within_a_second(self, server: Server, stream: bool) -> None:
        async def leave() -> str:
            body = chat(model="large", max_tokens=5000, ignore_eos=True, stream=stream)
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                route = await client.post("/v1/route", json=chat(model="large"))
                instance: str = route.json()["instance"]
                request = client.build_request("POST", "/v1/chat/completions", json=body)
                sending = asyncio.create_task(client.send(request, stream=True))
                await asyncio.to_thread(until, lambda: running(instance) == 1, 10)
                if stream:
                    response = await sending
                    assert await anext(response.aiter_bytes())
                    await response.aclose()
                else:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                return instance

        instance = asyncio.run(leave())
        until(lambda: running(instance) == 0, timeout_s=1)


class TestHandle:
    def test_chat(self, app: DeploymentHandle) -> None:
        answer = app.chat.remote(chat(max_tokens=4, ignore_eos=True)).result(timeout_s=30)
        assert answer["object"] == "chat.completion"
        assert answer["usage"]["completion_tokens"] == 4

    def test_completions(self, app: DeploymentHandle) -> None:
        body = {"model": "small", "prompt": "Once", "max_tokens": 3, "ignore_eos": True}
        answer = app.completions.remote(body).result(timeout_s=30)
        assert answer["object"] == "text_completion"

    def test_chat_stream(self, app: DeploymentHandle) -> None:
        stream = app.options(stream=True).chat_stream.remote(chat(max_tokens=5, ignore_eos=True))
        assert len(contents(list(stream))) == 5

    def test_route_and_models(self, app: DeploymentHandle) -> None:
        assert len(app.route.remote(chat()).result(timeout_s=30)["candidates"]) == 3
        assert len(app.models.remote().result(timeout_s=30)["data"]) == 3

    @pytest.mark.parametrize(("body", "status", "param"), BAD.values(), ids=BAD)
    def test_errors_carry_the_openai_error(
        self, app: DeploymentHandle, body: dict[str, Any], status: int, param: str
    ) -> None:
        with pytest.raises(ApiError) as raised:
            app.chat.remote(body).result(timeout_s=30)
        assert raised.value.status == status
        assert raised.value.error["param"] == param

    def test_closing_a_stream_frees_the_slot(self, app: DeploymentHandle) -> None:
        body = chat(model="large", max_tokens=5000, ignore_eos=True)
        instance = app.route.remote(body).result(timeout_s=30)["instance"]
        stream = app.options(stream=True).chat_stream.remote(body)
        next(stream)
        assert running(instance) == 1
        stream.cancel()
        until(lambda: running(instance) == 0, timeout_s=1)


class TestFleet:
    def test_hub_keeps_the_snapshots_in_the_object_store(self, app: DeploymentHandle) -> None:
        hub = serve.get_deployment_handle("Hub", "foretoken")
        [ref] = hub.view.remote().result(timeout_s=30)
        view = ray.get(ref)
        assert sorted(sighting.report.model for sighting in view.values()) == [
            "large",
            "small",
            "small",
        ]
        for sighting in view.values():
            assert Snapshot.from_bytes(sighting.snapshot).config == sighting.report.scheduler

    def test_requests_leave_records(self, records_dir: Path, client: httpx.Client) -> None:
        answer = client.post("/v1/chat/completions", json=chat(max_tokens=5, ignore_eos=True))
        decision_id = answer.headers["x-foretoken-decision-id"]

        def record() -> Any:
            records = read_records(records_dir)
            return next((r for r in records if r.decision.decision_id == decision_id), None)

        found = until(record, timeout_s=20)
        assert found.output_tokens == 5
        assert found.finish_reason == "length"
        assert found.ttft_s > found.engine_ttft_s > 0
        assert len(found.decision.candidates) == 3

    def test_a_dead_replica_is_passed_over(self, client: httpx.Client) -> None:
        body = chat(model="small", max_tokens=3, routing={"policy": "round_robin"})
        instance = client.post("/v1/route", json=body).json()["instance"]
        kill(instance)
        for _ in range(4):
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.headers["x-foretoken-instance"] != instance

    def test_a_stream_that_breaks_ends_with_an_error_event(self, client: httpx.Client) -> None:
        body = chat(model="large", max_tokens=5000, ignore_eos=True, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            kill(response.headers["x-foretoken-instance"])
            *_, last = (line for line in lines if line)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert response.headers["x-foretoken-instance"] in error["message"]
