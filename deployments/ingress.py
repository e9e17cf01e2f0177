"""The door: OpenAI over HTTP, the same as plain dicts over a Serve handle."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.types import Send

from app.config import PoolSettings
from app.types import AUTO, Decision, Forecast
from deployments.messages import Endpoint
from deployments.openai_protocol import (
    ApiError,
    endpoint_of,
    parse_json,
    slo_from_headers,
    sse,
)
from deployments.router import Answer, QueryRouter

app = FastAPI(title="Foretoken")


@app.exception_handler(ApiError)
async def _api_error(_: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status)


@app.exception_handler(HTTPException)
async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, error.headers)


@app.exception_handler(Exception)
async def _unforeseen(_: Request, error: Exception) -> JSONResponse:
    message = f"internal error: {type(error).__name__}"
    return JSONResponse(ApiError(500, message, type="server_error").body, 500)


class Ingress:
    async def __init__(
        self,
        settings: PoolSettings,
        hub: DeploymentHandle,
        engines: Mapping[str, DeploymentHandle],
    ) -> None:
        self._settings = settings
        self._created_s = int(time.time())
        node_id = ray.get_runtime_context().get_node_id()
        self._router = QueryRouter(settings, hub, engines, node_id)

    @app.post("/v1/chat/completions")
    async def post_chat_completions(self, request: Request) -> Response:
        return await self._respond("chat", request)

    @app.post("/v1/completions")
    async def post_completions(self, request: Request) -> Response:
        return await self._respond("completions", request)

    @app.post("/v1/route")
    async def post_route(self, request: Request) -> Response:
        arrived_s = time.time()
        body = parse_json(await request.body())
        slo_ms = slo_from_headers(request.headers)
        decision = await self._router.explain(endpoint_of(body), body, arrived_s, slo_ms)
        return JSONResponse(_explained(decision), headers=_headers(decision))

    @app.get("/v1/models")
    async def get_models(self) -> Response:
        return JSONResponse(self.models())

    @app.get("/health")
    async def get_health(self) -> Response:
        missing = self._router.missing_models
        if missing:
            message = f"no instance yet of {', '.join(missing)}"
            raise ApiError(503, message, type="server_error")
        return JSONResponse({"status": "ok"})

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion. Raises ApiError, as all the methods of the handle do."""
        return await self._whole("chat", body)

    async def completions(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._whole("completions", body)

    async def chat_stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chat completion chunks."""
        body = {**body, "stream": True}
        answer = await self._router.answer("chat", body, time.time(), None)
        async with aclosing(answer.payloads) as payloads:
            async for payload in payloads:
                for line in payload.splitlines():
                    data = line.removeprefix(b"data: ")
                    if data and data != b"[DONE]":
                        yield json.loads(data)

    async def route(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What ``/v1/route`` answers."""
        decision = await self._router.explain(endpoint_of(body), body, time.time(), None)
        return _explained(decision)

    def models(self) -> dict[str, Any]:
        contexts = {model.name: model.context_tokens for model in self._settings.models}
        contexts[AUTO] = max(contexts.values())
        listed = [
            {
                "id": name,
                "object": "model",
                "created": self._created_s,
                "owned_by": "foretoken",
                "max_model_len": context_tokens,
            }
            for name, context_tokens in contexts.items()
        ]
        return {"object": "list", "data": listed}

    async def check_health(self) -> None:
        self._router.check_health()

    def __del__(self) -> None:
        self._router.stop()

    async def _respond(self, endpoint: Endpoint, request: Request) -> Response:
        arrived_s = time.time()
        body = parse_json(await request.body())
        slo_ms = slo_from_headers(request.headers)
        answer = await self._router.answer(endpoint, body, arrived_s, slo_ms)
        headers = _headers(answer.decision)
        if body.get("stream"):
            return _EventStream(_events(answer), headers=headers)
        return Response(await _joined(answer), headers=headers, media_type="application/json")

    async def _whole(self, endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
        whole = {name: value for name, value in body.items() if name != "stream"}
        answer = await self._router.answer(endpoint, whole, time.time(), None)
        result: dict[str, Any] = json.loads(await _joined(answer))
        return result


class _EventStream(StreamingResponse):
    """Closes its source at once when the client goes away, not when memory is next tidied."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(events, headers={**headers, "cache-control": "no-cache"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


async def _events(answer: Answer) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(answer.payloads) as payloads:
            async for payload in payloads:
                yield payload
    except ApiError as error:
        # The status has been sent: an error event is all that is left.
        yield sse(error.body)


async def _joined(answer: Answer) -> bytes:
    async with aclosing(answer.payloads) as payloads:
        return b"".join([payload async for payload in payloads])


def _headers(decision: Decision) -> dict[str, str]:
    choice = decision.choice
    return {
        "x-foretoken-model": choice.model,
        "x-foretoken-instance": choice.instance_id,
        "x-foretoken-predicted-ttft-ms": f"{choice.ttft_s * 1e3:.3f}",
        "x-foretoken-decision-id": decision.decision_id,
    }


def _explained(decision: Decision) -> dict[str, Any]:
    return {
        "object": "foretoken.decision",
        "decision_id": decision.decision_id,
        "model": decision.choice.model,
        "instance": decision.choice.instance_id,
        "reason": decision.reason,
        "policy": decision.policy,
        "ttft_slo_ms": _milliseconds(decision.ttft_slo_s),
        "lambda": decision.cost_weight,
        "delta": decision.latency_weight,
        "decision_ms": _milliseconds(decision.decision_s),
        "pruned": decision.pruned,
        "candidates": [_candidate(forecast) for forecast in decision.candidates],
    }


def _candidate(forecast: Forecast) -> dict[str, Any]:
    return {
        "instance": forecast.instance_id,
        "model": forecast.model,
        "estimator": forecast.estimator.value,
        "predicted_ttft_ms": _milliseconds(forecast.ttft_s),
        "waiting_ms": _milliseconds(forecast.waiting_s),
        "prefill_ms": _milliseconds(forecast.prefill_s),
        "throughput_ttft_ms": _milliseconds(forecast.throughput_ttft_s),
        "snapshot_age_ms": _milliseconds(forecast.snapshot_age_s),
        "prompt_tokens": forecast.prompt_tokens,
        "cached_tokens": forecast.cached_tokens,
        "predicted_output_tokens": forecast.predicted_output_tokens,
        "quality": forecast.quality,
        "output_tokens_low": _number(forecast.output_tokens_low),
        "output_tokens_high": _number(forecast.output_tokens_high),
        "prediction_source": forecast.prediction_source,
        "cost_microusd": forecast.cost_microusd,
        "utility": forecast.utility,
        "feasible": forecast.feasible,
        "running": forecast.running,
        "waiting": forecast.waiting,
    }


def _milliseconds(seconds: float) -> float | None:
    return _number(round(seconds * 1e3, 3))


def _number(value: float) -> float | None:
    """JSON knows neither inf (no target, no end) nor nan (no snapshot)."""
    return value if math.isfinite(value) else None


# Not as a decorator: it copies the routes with the globals they have at that moment.
HttpIngress = serve.ingress(app)(Ingress)
