"""A small OpenAI-compatible server on a socket of its own, whose answers a test dictates."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

TOKENS = 3


def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": TOKENS}}


@dataclass
class Server:
    """Answers requests in the order they come, each by the next of ``behaviours``; then ``ok``."""

    behaviours: Sequence[str] = ()
    prefill_s: float = 0.05
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    streamed_to_the_end: int = 0

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        index = len(self.bodies)
        self.bodies.append(body)
        behaviour = self.behaviours[index] if index < len(self.behaviours) else "ok"
        if behaviour == "refuse":
            return JSONResponse({"error": {"message": "no instance"}}, status_code=503)
        return StreamingResponse(
            self._stream(behaviour),
            media_type="text/event-stream",
            headers={
                "x-foretoken-model": "qwen3-0.6b",
                "x-foretoken-instance": "qwen3-0.6b-0",
                "x-foretoken-predicted-ttft-ms": "soon" if behaviour == "bad header" else "12.5",
                "x-foretoken-decision-id": f"dec-{index:024x}",
            },
        )

    async def _stream(self, behaviour: str) -> AsyncIterator[str]:
        yield _event(chunk({"role": "assistant", "content": ""}))
        if behaviour == "hang":
            await anyio.sleep_forever()
        if behaviour == "error":
            yield _event({"error": {"message": "engine died"}})
            return
        if behaviour == "garble":
            yield "data: {\n\n"
        if behaviour == "no token":
            yield "data: [DONE]\n\n"
            return
        await anyio.sleep(self.prefill_s)
        for token in range(TOKENS):
            yield _event(chunk({"content": f"{token} "}))
            if behaviour == "cut":
                return
        yield _event(chunk({}, "stop"))
        yield _event(USAGE)
        yield "data: [DONE]\n\n"
        self.streamed_to_the_end += 1


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def serving(*behaviours: str) -> Iterator[Server]:
    server = Server(behaviours)
    app = Starlette(routes=[Route("/v1/chat/completions", server.chat, methods=["POST"])])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        uvicorn_server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield server
        finally:
            uvicorn_server.should_exit = True
            thread.join()


@pytest.fixture
def serve() -> Any:
    return serving
