"""Prompts to be asked, each once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.chat import PromptError, plain_messages
from app.rows import Row, read_rows

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt_id: str
    messages: Messages
    """As they are sent; ``plain_messages`` understands them."""
    task: str | None
    reference: str | None
    """What a right answer says."""


class _PromptRow(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | int | None = None
    prompt: str | None = Field(None, min_length=1)
    messages: list[dict[str, Any]] | None = None
    task: str | None = None
    reference: str | None = None

    @model_validator(mode="after")
    def _asks_once(self) -> _PromptRow:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a row has either prompt, a text that is not empty, or messages")
        if self.id == "":
            raise ValueError("id: must not be empty; without one, it follows from the messages")
        return self


def read_prompts(path: str | Path) -> list[Prompt]:
    """The same messages again, under whichever id, are left out. RowError where a row is no
    prompt, or where two rows of one id are not the same prompt."""
    by_id: dict[str, tuple[Prompt, Row]] = {}
    by_hash: dict[str, Prompt] = {}
    for row in read_rows(path):
        prompt = _prompt(row)
        known, known_row = by_id.setdefault(prompt.prompt_id, (prompt, row))
        if known != prompt:
            raise row.error(differs(known, prompt, known_row))
        by_hash.setdefault(message_hash(prompt.messages), prompt)
    return list(by_hash.values())


def sound_messages(messages: Sequence[Mapping[str, Any]], row: Row) -> Messages:
    """RowError for what no chat template would take. Parquet has every message hold every key:
    those that are null go."""
    sound = tuple({k: v for k, v in message.items() if v is not None} for message in messages)
    try:
        plain_messages(sound)
    except PromptError as error:
        raise row.error(str(error)) from error
    return sound


def message_hash(messages: Messages) -> str:
    """The same in every process, wherever the messages were read."""
    return text_hash(json.dumps(messages, sort_keys=True))


def text_hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def differs(known: Prompt, other: Prompt, known_row: Row) -> str:
    """What is wrong with a second prompt of one id."""
    fields = ("messages", "task", "reference")
    different = [name for name in fields if getattr(known, name) != getattr(other, name)]
    return (
        f"prompt {other.prompt_id!r} has other {' and '.join(different)} "
        f"than in {known_row.path}, {known_row.place}"
    )


def _prompt(row: Row) -> Prompt:
    read = row.read(_PromptRow)
    written = [{"role": "user", "content": read.prompt}] if read.messages is None else read.messages
    messages = sound_messages(written, row)
    prompt_id = message_hash(messages) if read.id is None else str(read.id)
    return Prompt(prompt_id, messages, read.task, read.reference)
