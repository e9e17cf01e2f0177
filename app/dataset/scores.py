"""What a judge found each answer to be worth: the rows that ``foretoken judge`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from app.dataset.answers import Answer
from app.dataset.prompts import text_hash
from app.rows import Row, read_rows


@dataclass(frozen=True, slots=True)
class Score:
    prompt_id: str
    model: str
    score: float
    """In [0, 1]."""
    judge_model: str | None
    """None where the scores come from elsewhere."""
    answer_hash: str | None
    """Of the answer that was scored; None where the scores come from elsewhere."""

    @property
    def key(self) -> tuple[str, str]:
        return self.prompt_id, self.model


class ScoreRow(BaseModel):
    """One answer's score or, without a model, the failure to judge a prompt."""

    model_config = ConfigDict(strict=True)

    prompt_id: str = Field(min_length=1)
    model: str | None = Field(None, min_length=1)
    score: FiniteFloat | None = Field(None, ge=0, le=1)
    judge_model: str | None = None
    answer_hash: str | None = None
    judge_prompt_tokens: int | None = Field(None, ge=0)
    """This and the next two are of the whole verdict, all its calls, and stand in its first row
    alone: so they can be summed."""
    judge_output_tokens: int | None = Field(None, ge=0)
    judge_cost_usd: FiniteFloat | None = Field(None, ge=0)
    failure: str | None = None

    @model_validator(mode="after")
    def _scored_or_failed(self) -> ScoreRow:
        if self.failure is None and (self.model is None or self.score is None):
            raise ValueError("a row has either model and score, or failure, a sentence")
        return self


@dataclass(frozen=True, slots=True)
class Verdict:
    """What judging one prompt came to, and what it took."""

    prompt_id: str
    judge_model: str
    scores: dict[str, tuple[float, str]]
    """In [0, 1], with the answer's hash, by model."""
    failure: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    cost_usd: float | None
    """None where no price was given."""

    def rows(self) -> list[dict[str, Any]]:
        rows = [
            ScoreRow(
                prompt_id=self.prompt_id,
                model=model,
                score=score,
                judge_model=self.judge_model,
                answer_hash=answer_hash,
            )
            for model, (score, answer_hash) in self.scores.items()
        ]
        if self.failure is not None:
            failed = ScoreRow(
                prompt_id=self.prompt_id, judge_model=self.judge_model, failure=self.failure
            )
            rows.append(failed)
        rows[0].judge_prompt_tokens = self.prompt_tokens
        rows[0].judge_output_tokens = self.output_tokens
        rows[0].judge_cost_usd = self.cost_usd
        return [row.model_dump() for row in rows]


def answer_hash(answer: Answer) -> str:
    """ValueError for an answer that failed."""
    if answer.text is None:
        raise ValueError(f"{answer.model} did not answer prompt {answer.prompt.prompt_id!r}")
    return text_hash(answer.text)


def read_score_rows(path: str | Path) -> Iterator[tuple[ScoreRow, Row]]:
    """All there are, superseded and failed ones too. Raises RowError."""
    for row in read_rows(path, torn_end=True):
        yield row.read(ScoreRow), row


def read_scores(path: str | Path, answers: Iterable[Answer] | None = None) -> list[Score]:
    """One for each prompt and model that has one, in the order in which they were first written.

    A judge's newer score stands over its older one. RowError, which names file and row, where a
    row is no score, and where two rows of different judges, or of none, score one answer
    differently. With ``answers``, also where a score is of a prompt or a model that is not among
    them, of an answer that failed, or of another text than the answer's.
    """
    standing: dict[tuple[str, str], tuple[Score, Row]] = {}
    for read, row in read_score_rows(path):
        if read.model is None or read.score is None:
            continue
        score = Score(read.prompt_id, read.model, read.score, read.judge_model, read.answer_hash)
        earlier, earlier_row = standing.get(score.key, (score, row))
        same_judge = score.judge_model is not None and score.judge_model == earlier.judge_model
        if score.score != earlier.score and not same_judge:
            raise row.error(
                f"the answer of {score.model} to prompt {score.prompt_id!r} scores {score.score} "
                f"here and {earlier.score} in {earlier_row.place}"
            )
        standing[score.key] = score, row
    if answers is not None:
        _match(standing.values(), answers)
    return [score for score, _ in standing.values()]


def _match(scores: Iterable[tuple[Score, Row]], answers: Iterable[Answer]) -> None:
    by_key = {answer.key: answer for answer in answers}
    prompt_ids = {prompt_id for prompt_id, _ in by_key}
    models = {model for _, model in by_key}
    for score, row in scores:
        if score.prompt_id not in prompt_ids:
            raise row.error(f"prompt {score.prompt_id!r} is not among the answers")
        if score.model not in models:
            raise row.error(f"model {score.model!r} is not among the answers")
        answer = by_key.get(score.key)
        if answer is None or answer.text is None:
            raise row.error(f"{score.model} has no answer to prompt {score.prompt_id!r}")
        if score.answer_hash not in (None, answer_hash(answer)):
            raise row.error(
                f"scores another answer of {score.model} to prompt {score.prompt_id!r} than "
                f"there is now: judge it again"
            )
