"""The OpenAI protocol at the edge: bodies checked, errors shaped, events framed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from app.chat import said
from app.policies import PolicyName
from app.tokenizer import Tokenizer
from app.types import FinishReason, TokenIds
from deployments.messages import Endpoint

DONE = b"data: [DONE]\n\n"
MAX_NESTING = 100
"""Of a body's objects and arrays: what is much deeper cannot be handed on to a replica."""
SLO_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")


class ApiError(Exception):
    """An OpenAI-shaped refusal or failure with its HTTP status.

    Everything it holds is in ``args``, so it survives pickling between replicas.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        type: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(status, message, param, type, code)
        self.status = status
        self.error: dict[str, Any] = {
            "message": message,
            "type": type,
            "param": param,
            "code": code,
        }

    @classmethod
    def of(cls, status: int, error: Mapping[str, Any]) -> ApiError:
        return cls(status, error["message"], error["param"], error["type"], error["code"])

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.error}

    def __str__(self) -> str:
        return str(self.error["message"])


def sse(chunk: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


class Routing(BaseModel):
    """The body's ``routing`` object: one query's departures from the pool's settings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    ttft_slo_ms: float | None = Field(None, gt=0)
    lambda_per_microusd: float | None = Field(None, ge=0, alias="lambda")
    delta_per_s: float | None = Field(None, ge=0, alias="delta")
    policy: PolicyName | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool = False


class Generation(BaseModel):
    """What both endpoints share. Fields it does not name pass through to the engine."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    routing: Routing = Field(default_factory=Routing)

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only where stream is true")
        return self

    @property
    def output_limit(self) -> int | None:
        """The caller's limit on output tokens."""
        return self.max_tokens

    def field_of(self, param: str | None) -> str | None:
        """What this body calls ``messages`` or ``max_tokens``."""
        return param

    @property
    def text(self) -> str:
        """The prompt as text, for predictors that read it. PromptError where it is none."""
        raise NotImplementedError

    def encode(self, tokenizer: Tokenizer) -> TokenIds:
        """The prompt as this tokenizer's ids. PromptError where it is none."""
        raise NotImplementedError


class ChatCompletion(Generation):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def output_limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def field_of(self, param: str | None) -> str | None:
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return param

    @property
    def text(self) -> str:
        return said(self.messages)

    def encode(self, tokenizer: Tokenizer) -> TokenIds:
        return tokenizer.encode_chat(self.messages, self.tools, self.chat_template_kwargs)


class Completion(Generation):
    prompt: Any

    @field_validator("prompt")
    @classmethod
    def _is_one_text(cls, prompt: Any) -> str:
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if isinstance(prompt, str) and prompt:
            return prompt
        raise ValueError("prompt must be one string, not empty: each prompt is routed by itself")

    def field_of(self, param: str | None) -> str | None:
        return "prompt" if param == "messages" else param

    @property
    def text(self) -> str:
        return str(self.prompt)

    def encode(self, tokenizer: Tokenizer) -> TokenIds:
        return tokenizer.encode_text(self.prompt)


_BODIES: dict[Endpoint, type[Generation]] = {
    "chat": ChatCompletion,
    "completions": Completion,
}


def parse_json(data: bytes) -> dict[str, Any]:
    """The body of an HTTP request; ApiError 400 where it is not a JSON object."""
    try:
        body = json.loads(data)
    # ValueError: no JSON, no Unicode, or a number of more digits than Python converts.
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, not {type(body).__name__}")
    if _nests_deeper(body, MAX_NESTING):
        raise ApiError(400, f"The body must not nest deeper than {MAX_NESTING} levels")
    return body


def _nests_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_nests_deeper(part, levels - 1) for part in parts)


def parse(endpoint: Endpoint, body: Mapping[str, Any]) -> Generation:
    """Checks the fields the router uses; ApiError 400 names the first that is wrong."""
    try:
        return _BODIES[endpoint].model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _dotted(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if not param:
            param = message.split(" ", 1)[0]
        raise ApiError(400, f"{param}: {message}", param) from error


def endpoint_of(body: Mapping[str, Any]) -> Endpoint:
    """Which endpoint a body is meant for: ``/v1/route`` takes either."""
    return "chat" if "messages" in body or "prompt" not in body else "completions"


def slo_from_headers(headers: Mapping[str, str]) -> float | None:
    """TTFT target in milliseconds; the body's ``routing.ttft_slo_ms`` wins over it."""
    for name in SLO_HEADERS:
        if (text := headers.get(name)) is None:
            continue
        try:
            slo_ms = float(text)
        except ValueError:
            slo_ms = math.nan
        if not (math.isfinite(slo_ms) and slo_ms > 0):
            raise ApiError(400, f"{name} must be a number of milliseconds above 0: {text!r}", name)
        return slo_ms
    return None


def _dotted(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


class AnswerFrame:
    """The envelope of one answer: builds its chunks and its whole, for either endpoint."""

    def __init__(self, endpoint: Endpoint, answer_id: str, model: str, created_s: int) -> None:
        self._chat = endpoint == "chat"
        self._head = {"id": answer_id, "created": created_s, "model": model}
        # One token, one event, thousands a second: only the text differs between them.
        blank = sse(self._chunk(self._delta({"content": "\0"}, "\0", None)))
        self._before, self._after = blank.split(json.dumps("\0").encode())

    def opening(self) -> bytes:
        """The role delta; text completions have none."""
        if not self._chat:
            return b""
        return sse(self._chunk(self._delta({"role": "assistant", "content": ""}, "", None)))

    def token(self, text: str) -> bytes:
        return self._before + json.dumps(text).encode() + self._after

    def closing(self, finish_reason: FinishReason) -> bytes:
        return sse(self._chunk(self._delta({}, "", finish_reason)))

    def usage(self, prompt_tokens: int, output_tokens: int) -> bytes:
        chunk = self._chunk(None)
        chunk["usage"] = usage(prompt_tokens, output_tokens)
        return sse(chunk)

    def whole(
        self,
        text: str,
        finish_reason: FinishReason,
        prompt_tokens: int,
        output_tokens: int,
    ) -> bytes:
        answer: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        choice = {
            "index": 0,
            **answer,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        kind = "chat.completion" if self._chat else "text_completion"
        body = {
            **self._head,
            "object": kind,
            "choices": [choice],
            "usage": usage(prompt_tokens, output_tokens),
        }
        return json.dumps(body).encode()

    def _delta(
        self, delta: dict[str, str], text: str, finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"delta": delta} if self._chat else {"text": text}
        return {"index": 0, **part, "logprobs": None, "finish_reason": finish_reason}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {
            **self._head,
            "object": kind,
            "choices": [] if choice is None else [choice],
        }


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }
