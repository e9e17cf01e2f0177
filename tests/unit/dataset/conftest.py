"""A pool, or a judge, on a socket of its own, whose replies a test dictates."""

from __future__ import annotations

import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Body = dict[str, Any]
Step = str | int | tuple[int, str] | dict[str, str] | Callable[[Body], str | None]


def echo(body: Body) -> str:
    return f"{body['model']} on {body['messages'][-1]['content']}"


@dataclass
class Server:
    """Replies to each request by the next of ``steps``, in the order they come; then by ``says``.

    A step is a status, one with its body, the headers of a 429, ``cut``, ``hang``, a body that is
    not a completion, or what says the text."""

    steps: Sequence[Step] = ()
    says: Callable[[Body], str | None] = echo
    models: Sequence[str] = ("auto", "small", "large")
    usage: dict[str, int] | None = field(
        default_factory=lambda: {"prompt_tokens": 7, "completion_tokens": 3}
    )
    together: int = 1
    """As many wait for one another before the first is answered."""
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    """Those of listing the models too."""
    at_s: list[float] = field(default_factory=list)
    hung: threading.Event = field(default_factory=threading.Event)
    most_at_once: int = 0
    _at_once: int = 0
    _gathered: anyio.Event | None = None

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Model and prompt of each request."""
        return [(body["model"], body["messages"][-1]["content"]) for body in self.bodies]

    async def list_models(self, request: Request) -> Response:
        self.queries.append(request.url.query)
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        index = len(self.bodies)
        self.bodies.append(body)
        self.queries.append(request.url.query)
        self.headers.append(dict(request.headers))
        self.at_s.append(time.monotonic())
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self._gather()
            return await self._reply(self.steps[index] if index < len(self.steps) else "ok", body)
        finally:
            self._at_once -= 1

    async def _gather(self) -> None:
        self._gathered = self._gathered or anyio.Event()
        if self._at_once >= self.together:
            self._gathered.set()
        await self._gathered.wait()

    async def _reply(self, step: Step, body: Body) -> Response:
        if isinstance(step, int):
            return JSONResponse({"error": {"message": "no instance"}}, status_code=step)
        if isinstance(step, tuple):
            return Response(step[1], step[0])
        if isinstance(step, dict):
            return JSONResponse({"error": {"message": "slow down"}}, 429, step)
        if step == "hang":
            return StreamingResponse(self._hang())
        if step == "cut":
            return StreamingResponse(_one_byte(), headers={"content-length": "100"})
        if isinstance(step, str) and step != "ok":
            return Response(step)
        text = step(body) if callable(step) else self.says(body)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {} if self.usage is None else {"usage": self.usage}
        return JSONResponse({"object": "chat.completion", "choices": [choice], **usage})

    async def _hang(self) -> AsyncIterator[bytes]:
        yield b" "
        self.hung.set()
        await anyio.sleep_forever()


async def _one_byte() -> AsyncIterator[bytes]:
    yield b"{"


class Host:
    """One socket for all tests, each with a server of its own: to start one takes a while."""

    def __init__(self) -> None:
        self._server = Server()
        self._listening = socket.create_server(("127.0.0.1", 0))

    @contextmanager
    def serving(self, *steps: Step, **changes: Any) -> Iterator[Server]:
        url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._server = Server(steps, url=url, **changes)
        yield self._server

    @contextmanager
    def running(self) -> Iterator[None]:
        routes = [
            Route("/v1/models", self._list_models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        with self._listening as listening:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            try:
                yield
            finally:
                server.should_exit = True
                thread.join()

    async def _list_models(self, request: Request) -> Response:
        return await self._server.list_models(request)

    async def _chat(self, request: Request) -> Response:
        return await self._server.chat(request)


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    host = Host()
    with host.running():
        yield host


@pytest.fixture
def serve(host: Host) -> Any:
    return host.serving


@pytest.fixture(autouse=True)
def _soon_and_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.dataset.endpoint.BACKOFF_S", 0.01)
    # To read the certificates that nobody needs here takes longer than a test.
    no_certificates = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, verify=no_certificates))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A JSON Lines file of these rows; text goes in as it is."""

    def write(name: str, *rows: dict[str, Any] | str) -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
        path.write_text("".join(lines))
        return path

    return write


@pytest.fixture
def rows() -> Callable[[Path], list[dict[str, Any]]]:
    def rows(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    return rows


@pytest.fixture
def file_limit() -> Callable[[int], AbstractContextManager[None]]:
    @contextmanager
    def file_limit(size: int) -> Iterator[None]:
        """No file grows beyond so many bytes: as if the disk were full. That of pytest's own output
        neither, so it must not last."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return file_limit
