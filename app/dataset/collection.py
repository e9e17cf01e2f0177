"""Every model's answer to every prompt, asked of a running pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.dataset.answers import Answer, read_answers
from app.dataset.endpoint import CallFailed, Endpoint, EndpointError, api_of
from app.dataset.journal import Journal
from app.dataset.progress import progress
from app.dataset.prompts import Prompt
from app.dataset.tally import Tally
from app.dataset.workers import work_off
from app.rows import RowError
from app.types import AUTO


@dataclass(frozen=True, slots=True)
class Collection:
    """Who is asked, and how."""

    url: str
    models: tuple[str, ...] = ()
    """Empty: all of the pool."""
    max_tokens: int | None = None
    concurrency: int = 8
    timeout_s: float = 300.0
    """For each attempt."""

    def __post_init__(self) -> None:
        api_of(self.url)
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 < self.timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, not {self.timeout_s}")


@dataclass(slots=True)
class Collected:
    """What a run came to."""

    models: Sequence[str]
    already: int
    """Answers that were there."""
    tally: Tally = field(default_factory=Tally)


async def collect(collection: Collection, prompts: Sequence[Prompt], journal: Journal) -> Collected:
    """Appends a row for each prompt and model as it comes, answered or failed, and asks nothing
    that the journal answers already. Raises EndpointError, RowError, OSError."""
    answered = _answered(prompts, journal)
    async with Endpoint(collection.url, collection.timeout_s, collection.concurrency) as endpoint:
        models = _choice(collection.models, await endpoint.models())
        wanted = [(prompt, model) for prompt in prompts for model in models]
        asks = [ask for ask in wanted if (ask[0].prompt_id, ask[1]) not in answered]
        collected = Collected(models, already=len(wanted) - len(asks))
        with progress("asking", len(asks), collected.tally) as advance:

            async def ask(of: tuple[Prompt, str]) -> None:
                answer = await _ask(endpoint, *of, collection.max_tokens, collected.tally)
                journal.append(answer.row())
                advance()

            await work_off(asks, ask, collection.concurrency)
    return collected


def _answered(prompts: Sequence[Prompt], journal: Journal) -> set[tuple[str, str]]:
    answers = read_answers(journal.path)
    there = {answer.prompt.prompt_id: answer.prompt for answer in answers}
    for prompt in prompts:
        if there.get(prompt.prompt_id, prompt) != prompt:
            raise RowError(
                f"{journal.path}: prompt {prompt.prompt_id!r} was another one when it was asked; "
                f"collect these prompts into another file"
            )
    return {answer.key for answer in answers if answer.failure is None}


def _choice(models: Sequence[str], served: Sequence[str]) -> list[str]:
    """Raises EndpointError."""
    served = [name for name in served if name != AUTO]
    if not served:
        raise EndpointError("the pool lists no models")
    if unknown := [name for name in models if name not in served]:
        raise EndpointError(f"the pool has no {', '.join(unknown)}: it has {', '.join(served)}")
    return list(dict.fromkeys(models or served))


async def _ask(
    endpoint: Endpoint, prompt: Prompt, model: str, max_tokens: int | None, tally: Tally
) -> Answer:
    body: dict[str, Any] = {"model": model, "messages": prompt.messages}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    try:
        reply = await endpoint.chat(body)
        if reply.text is None:
            raise CallFailed(
                "no_text", f"an answer without text, finished by {reply.finish_reason}"
            )
    except CallFailed as failure:
        tally.fail(failure.kind, str(failure))
        return Answer(prompt, model, None, None, None, None, str(failure))
    tally.done += 1
    return Answer(
        prompt=prompt,
        model=model,
        text=reply.text,
        prompt_tokens=reply.prompt_tokens,
        output_tokens=reply.output_tokens,
        finish_reason=reply.finish_reason,
        failure=None,
    )
