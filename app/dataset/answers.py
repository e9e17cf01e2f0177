"""What the models of a pool answered: the rows that ``foretoken collect`` writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.dataset.prompts import Prompt, differs, sound_messages
from app.rows import Row, read_rows


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: Prompt
    model: str
    text: str | None
    """None where it failed; empty where the model had nothing to say."""
    prompt_tokens: int | None
    """Under the model's own tokenizer; None where the server did not say."""
    output_tokens: int | None
    finish_reason: str | None
    failure: str | None
    """One sentence, None for what was answered."""

    @property
    def key(self) -> tuple[str, str]:
        return self.prompt.prompt_id, self.model

    def row(self) -> dict[str, Any]:
        return {
            "prompt_id": self.prompt.prompt_id,
            "messages": self.prompt.messages,
            "task": self.prompt.task,
            "reference": self.prompt.reference,
            "model": self.model,
            "answer": self.text,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
            "failure": self.failure,
        }


class _AnswerRow(BaseModel):
    model_config = ConfigDict(strict=True)

    prompt_id: str = Field(min_length=1)
    messages: list[dict[str, Any]]
    task: str | None = None
    reference: str | None = None
    model: str = Field(min_length=1)
    answer: str | None = None
    prompt_tokens: int | None = Field(None, ge=0)
    output_tokens: int | None = Field(None, ge=0)
    finish_reason: str | None = None
    failure: str | None = None

    @model_validator(mode="after")
    def _answered_or_failed(self) -> _AnswerRow:
        if (self.answer is None) == (self.failure is None):
            raise ValueError("a row has either answer, a text, or failure, a sentence")
        return self


def read_answers(path: str | Path) -> list[Answer]:
    """One for each prompt and model, in the order in which they were first written.

    What was answered stands over what failed, the newest failure over earlier ones. RowError,
    which names file and row, where a row is no answer, where two rows of one prompt id are not
    the same prompt, and where a model has two different answers to one prompt, or one that was
    counted differently.
    """
    prompts: dict[str, tuple[Prompt, Row]] = {}
    standing: dict[tuple[str, str], tuple[Answer, Row]] = {}
    for row in read_rows(path, torn_end=True):
        answer = _answer(row, prompts)
        earlier, earlier_row = standing.setdefault(answer.key, (answer, row))
        if earlier.failure is not None:
            standing[answer.key] = answer, row
        elif answer.failure is None and (problem := _contradiction(earlier, answer)):
            raise row.error(f"{problem} in {earlier_row.place}")
    return [answer for answer, _ in standing.values()]


def _contradiction(earlier: Answer, answer: Answer) -> str | None:
    """Ends where the earlier one's place is named."""
    prompt_id, model = answer.key
    if answer.text != earlier.text:
        return f"another answer of {model} to prompt {prompt_id!r} than"
    if answer.output_tokens != earlier.output_tokens:
        return (
            f"the answer of {model} to prompt {prompt_id!r} has output_tokens "
            f"{_shown(answer.output_tokens)} here and {_shown(earlier.output_tokens)}"
        )
    return None


def _shown(tokens: int | None) -> str:
    return "null" if tokens is None else str(tokens)


def _answer(row: Row, prompts: dict[str, tuple[Prompt, Row]]) -> Answer:
    read = row.read(_AnswerRow)
    messages = sound_messages(read.messages, row)
    prompt = Prompt(read.prompt_id, messages, read.task, read.reference)
    known, known_row = prompts.setdefault(prompt.prompt_id, (prompt, row))
    if known != prompt:
        raise row.error(differs(known, prompt, known_row))
    return Answer(
        prompt=known,
        model=read.model,
        text=read.answer,
        prompt_tokens=read.prompt_tokens,
        output_tokens=read.output_tokens,
        finish_reason=read.finish_reason,
        failure=read.failure,
    )
