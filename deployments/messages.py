"""What travels between the router and an engine replica, over a streaming Serve handle."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from deployments.timing import Timing
from sfs_ext import SchedulerConfig

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One query, dispatched: the caller's OpenAI body and what the router knows of it."""

    decision_id: str
    request_key: int
    endpoint: Endpoint
    body: dict[str, Any]
    """The caller's OpenAI request, ``model`` replaced by the name of the chosen model."""
    prompt_token_ids: NDArray[np.int32]
    """Tokenised once, in the router, under this instance's tokenizer."""
    max_tokens: int
    predicted_output_tokens: float
    priority: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has the request; the HTTP answer may begin."""

    at_s: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine handed over the first output token at this Unix time."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes for the caller as they are: SSE events when streaming, else the JSON body."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    prompt_tokens: int
    output_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """An OpenAI-shaped refusal or failure; nothing follows it."""

    status: int
    error: dict[str, Any]
    """``{"message": …, "type": …, "param": …, "code": …}``."""


EngineEvent = Accepted | FirstToken | Payload | Finished | Failed


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """What a replica says of itself when its engine stands."""

    instance_id: str
    model: str
    replica_id: str
    node_id: str
    snapshot_path: str
    """Shared-memory file, readable on the replica's node."""
    snapshot_endpoint: str
    """ZMQ address of the replica's relay, for routers on other nodes."""
    scheduler: SchedulerConfig
    timing: Timing


class Engine(Protocol):
    """One serving engine behind a replica."""

    @property
    def snapshot_path(self) -> str: ...

    @property
    def scheduler(self) -> SchedulerConfig: ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Accepted, FirstToken, Payload…, Finished; or Failed. Closing it aborts the request."""
        ...

    async def check_health(self) -> None:
        """Raises when the engine can no longer serve."""
        ...

    async def stop(self) -> None: ...
