"""What a model answered to a prompt, as predictors learn from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.chat import PromptError, said
from app.dataset.answers import Answer
from app.dataset.prompts import text_hash
from app.prediction.features import FEATURE_VERSION, prompt_features
from app.records import DecisionRecord
from app.rows import Row, read_rows
from app.tokenizer import Tokenizer
from app.types import FINISH_REASONS, PromptFeatures


@dataclass(frozen=True, slots=True)
class Example:
    prompt_id: str
    model: str
    prompt: PromptFeatures
    task: str
    """Empty where none is told."""
    output_tokens: int | None
    quality: float | None
    """In [0, 1]."""


def chat_features(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> PromptFeatures:
    """As the router sees the same messages at ``/v1/chat/completions``. PromptError."""
    return prompt_features(tokenizer.encode_chat(messages), said(messages))


def examples_of(
    answers: Iterable[Answer], scores: Mapping[tuple[str, str], float], tokenizer: Tokenizer
) -> list[Example]:
    """``scores``: by prompt id and model. What teaches nothing is left out: failed answers, and
    those with neither a length nor a score."""
    features: dict[str, PromptFeatures] = {}
    examples = []
    for answer in answers:
        score = scores.get(answer.key)
        if answer.failure is not None or (answer.output_tokens is None and score is None):
            continue
        prompt = answer.prompt
        if prompt.prompt_id not in features:
            features[prompt.prompt_id] = chat_features(prompt.messages, tokenizer)
        examples.append(
            Example(
                prompt_id=_feature_hash(features[prompt.prompt_id]),
                model=answer.model,
                prompt=features[prompt.prompt_id],
                task=prompt.task or "",
                output_tokens=answer.output_tokens,
                quality=score,
            )
        )
    return examples


def examples_of_records(records: Iterable[DecisionRecord]) -> list[Example]:
    """Lengths alone: nobody judged these answers. Left out are answers that had no room for a long
    one, by their limit and not by how they ended, and those that did not end by themselves: of
    answers that users break off, long ones are therefore missed. ValueError for features of
    another version."""
    examples = []
    for record in records:
        if record.finish_reason not in FINISH_REASONS.values() or not record.prompt_hash:
            continue
        if record.decision.choice.limits_answer:
            continue
        if record.feature_version != FEATURE_VERSION:
            raise ValueError(
                f"record {record.decision.decision_id} has features of version "
                f"{record.feature_version}; this computes version {FEATURE_VERSION}"
            )
        features = PromptFeatures(
            np.array(record.prompt_hash, np.int32), np.array(record.prompt_description)
        )
        examples.append(
            Example(
                prompt_id=_feature_hash(features),
                model=record.decision.choice.model,
                prompt=features,
                task="",
                output_tokens=record.output_tokens,
                quality=None,
            )
        )
    return examples


class _FlatRow(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    prompt: str = Field(min_length=1)
    model: str = Field(min_length=1)
    task: str | None = None
    output_tokens: int | None = Field(None, ge=0)
    quality: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _teaches(self) -> _FlatRow:
        if self.output_tokens is None and self.quality is None:
            raise ValueError("a row has output_tokens, quality or both")
        return self


def read_examples(
    path: str | Path,
    tokenizer: Tokenizer,
    rename: Mapping[str, str] | None = None,
    models: Sequence[str] | None = None,
) -> list[Example]:
    """Of a JSONL or Parquet file with ``prompt``, ``model``, and ``output_tokens``, ``quality`` or
    both, ``task`` if there is one. ``rename``: the file's names to these; ``models``: others' rows
    are passed over.

    RowError, naming file and row: a row that cannot be used, and two that contradict each other.
    """
    features: dict[str, PromptFeatures] = {}
    seen: dict[tuple[str, str], tuple[Example, Row]] = {}
    names = rename or {}
    for row in read_rows(path):
        values = {names.get(name, name): value for name, value in row.values.items()}
        if models is not None and values.get("model") not in models:
            continue
        read = Row(row.path, row.number, values).read(_FlatRow)
        if read.prompt not in features:
            try:
                features[read.prompt] = chat_features(
                    [{"role": "user", "content": read.prompt}], tokenizer
                )
            except PromptError as error:
                raise row.error(f"prompt: {error}") from error
        example = Example(
            prompt_id=text_hash(read.prompt),
            model=read.model,
            prompt=features[read.prompt],
            task=read.task or "",
            output_tokens=read.output_tokens,
            quality=read.quality,
        )
        key = (example.prompt_id, example.model)
        earlier, earlier_row = seen.setdefault(key, (example, row))
        if (earlier.output_tokens, earlier.quality) != (example.output_tokens, example.quality):
            raise row.error(
                f"another outcome of {example.model} for the same prompt than in "
                f"{earlier_row.place}"
            )
    return [example for example, _ in seen.values()]


def prompt_texts(path: str | Path, rename: Mapping[str, str] | None = None) -> dict[str, str]:
    """By prompt id, as ``read_examples`` names them."""
    column = {new: old for old, new in (rename or {}).items()}.get("prompt", "prompt")
    texts = (row.values.get(column) for row in read_rows(path))
    return {text_hash(text): text for text in texts if isinstance(text, str)}


def _feature_hash(features: PromptFeatures) -> str:
    """One for prompts that are the same to predictors, wherever they come from: else one would be
    both learnt from and held back."""
    data = features.buckets.tobytes() + features.description.tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def without_repeats(examples: Iterable[Example]) -> list[Example]:
    """Each outcome of a model for a prompt once, with its score if any has one: a pool's records
    hold what was collected from it, too."""
    kept: dict[tuple[str, str, int | None], Example] = {}
    for example in examples:
        key = (example.prompt_id, example.model, example.output_tokens)
        if key not in kept or kept[key].quality is None:
            kept[key] = example
    return list(kept.values())


def digest(examples: Iterable[Example]) -> str:
    """SHA-256 of all that is learnt from, whatever its order."""
    lines = sorted(
        json.dumps(
            [
                example.prompt_id,
                example.model,
                example.prompt.buckets.tolist(),
                example.prompt.description.tolist(),
                example.task,
                example.output_tokens,
                example.quality,
            ]
        )
        for example in examples
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
