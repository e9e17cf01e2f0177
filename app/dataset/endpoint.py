"""An OpenAI-compatible server that is asked with patience."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ATTEMPTS = 5
"""Of one call: what refuses, breaks off or does not answer in time is asked again."""
BACKOFF_S = 1.0
"""Before the second attempt; twice as long before each one after it."""
RETRY_AFTER_MAX_S = 120.0
"""Who asks for more patience than that has failed."""
QUOTED_CHARACTERS = 300


class EndpointError(Exception):
    """Nothing can be asked there at all."""


class CallFailed(Exception):
    """One call that came to nothing; the text is one sentence."""

    def __init__(
        self,
        kind: str,
        sentence: str,
        passing: bool = False,
        billed: bool = False,
        retry_after_s: float | None = None,
        refusal: tuple[int, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.kind = kind
        """As failures are counted."""
        self.passing = passing
        """Whether to ask again makes sense."""
        self.billed = billed
        """Whether the server may have worked on it: it was sent, and not refused."""
        self.retry_after_s = retry_after_s
        self.refusal = refusal
        """Status and reason, where the request itself was refused, and would be again."""


@dataclass(frozen=True, slots=True)
class Reply:
    text: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    """None, as ``output_tokens``, where the server did not say."""
    output_tokens: int | None


Send = Callable[[], Awaitable[Reply]]
Around = Callable[[Send], Awaitable[Reply]]
"""Makes one attempt at a call, and may do something before and after it."""


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True)


class _Message(_Wire):
    content: str | None = None


class _Choice(_Wire):
    message: _Message
    finish_reason: str | None = None


class _Usage(_Wire):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class _Completion(_Wire):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


class _Error(_Wire):
    message: str


class _Refused(_Wire):
    error: _Error


class _Model(_Wire):
    id: str


class _Models(_Wire):
    data: list[_Model]


class Endpoint:
    """``url`` is a server, ``http://127.0.0.1:8000``, or where its API lives,
    ``https://api.openai.com/v1``; the address of chat completions itself will do. A query goes
    with every call."""

    def __init__(
        self,
        url: str,
        timeout_s: float,
        connections: int,
        api_key: str | None = None,
        trust_env: bool = False,
    ) -> None:
        self._api = api_of(url)
        self._shown = str(self._api.copy_with(query=None))  # A query may hold a key.
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(timeout_s),
            limits=httpx.Limits(max_connections=connections),
            trust_env=trust_env,
            follow_redirects=False,
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def models(self) -> list[str]:
        """Raises EndpointError."""
        try:
            answer = await self._send("GET", "/models")
            return [model.id for model in _Models.model_validate_json(answer.content).data]
        except CallFailed as error:
            raise EndpointError(f"{self._shown}/models: {error}") from error
        except ValidationError as error:
            raise EndpointError(f"{self._shown}/models is no list of models") from error

    async def chat(self, body: Mapping[str, Any], around: Around | None = None) -> Reply:
        """Raises CallFailed when all attempts have; EndpointError where the key is refused; what
        ``around`` raises."""

        async def send() -> Reply:
            return _reply(await self._send("POST", "/chat/completions", body))

        attempt = 1
        while True:
            try:
                return await (send() if around is None else around(send))
            except CallFailed as failure:
                if failure.kind == "http_401":
                    raise EndpointError(f"{self._shown}: {failure}") from failure
                wait_s = failure.retry_after_s
                if wait_s is None:
                    wait_s = BACKOFF_S * 2 ** (attempt - 1)
                impatient = wait_s > RETRY_AFTER_MAX_S
                if impatient or attempt == ATTEMPTS or not failure.passing:
                    wait = f"; asks to wait for {wait_s:g} s" if impatient else ""
                    times = f" (attempt {attempt})" if attempt > 1 else ""
                    raise CallFailed(
                        failure.kind, f"{failure}{wait}{times}", refusal=failure.refusal
                    ) from failure
            await asyncio.sleep(wait_s)
            attempt += 1

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        sent = False

        async def trace(event: str, details: Mapping[str, Any]) -> None:
            nonlocal sent
            if event.endswith(".send_request_headers.started"):
                # A tunnel through a proxy is asked for under the same name.
                sent = sent or details["request"].method != b"CONNECT"

        url = self._api.copy_with(raw_path=_raw_path(self._api, path))
        try:
            # httpx's own limits are on each read: an answer that trickles would never end.
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.request(
                    method, url, json=body, extensions={"trace": trace}
                )
        except (TimeoutError, httpx.TimeoutException) as error:
            sentence = f"no answer within {self._timeout_s:g} s"
            raise CallFailed("timeout", sentence, passing=True, billed=sent) from error
        except httpx.TransportError as error:
            kind = type(error).__name__
            raise CallFailed(kind, f"{kind}: {error}", passing=True, billed=sent) from error
        except httpx.HTTPError as error:
            raise CallFailed(type(error).__name__, str(error), billed=sent) from error
        if answer.status_code != httpx.codes.OK:
            raise _refusal(answer)
        return answer


def api_of(url: str) -> httpx.URL:
    """Raises ValueError, which shows nothing of what may be a password or a key."""
    shown = "" if "@" in url else f": {url.partition('?')[0]!r}"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError(f"url cannot be read{shown}") from None
    if parsed.userinfo:
        raise ValueError("url must not hold a user or a password")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url must begin with http:// or https:// and name a host{shown}")
    path, *_ = parsed.raw_path.partition(b"?")
    path = path.rstrip(b"/").removesuffix(b"/chat/completions") or b"/v1"
    query = b"?" + parsed.query if parsed.query else b""
    return parsed.copy_with(raw_path=path + query, fragment=None)


def _raw_path(api: httpx.URL, path: str) -> bytes:
    before, mark, query = api.raw_path.partition(b"?")
    return before + path.encode() + mark + query


def _refusal(answer: httpx.Response) -> CallFailed:
    status = answer.status_code
    passing = status == httpx.codes.TOO_MANY_REQUESTS or status >= 500
    return CallFailed(
        f"http_{status}",
        f"refused with status {status}: {_quoted(answer)}",
        passing,
        retry_after_s=_retry_after_s(answer.headers.get("retry-after")),
        refusal=(status, _reason(answer)) if 400 <= status < 500 and not passing else None,
    )


def _reason(answer: httpx.Response) -> str:
    """Without what differs from call to call, such as an id of the request."""
    try:
        return _Refused.model_validate_json(answer.content).error.message
    except ValidationError:
        return answer.text


def _reply(answer: httpx.Response) -> Reply:
    try:
        completion = _Completion.model_validate_json(answer.content)
    except ValidationError as error:
        sentence = f"not a chat completion: {_quoted(answer)}"
        raise CallFailed("bad_reply", sentence, billed=True) from error
    choice, usage = completion.choices[0], completion.usage
    return Reply(
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
    )


def _quoted(answer: httpx.Response) -> str:
    text = " ".join(answer.text.split())
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}…"


def _retry_after_s(text: str | None) -> float | None:
    """Seconds or a date; None where it is neither."""
    if text is None:
        return None
    try:
        wait_s = float(text)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    return None if math.isnan(wait_s) else max(0.0, wait_s)
