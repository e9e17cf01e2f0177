"""The answers to one prompt, to be judged together."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from app.dataset.answers import Answer
from app.dataset.prompts import Prompt
from app.dataset.rubric import LETTERS
from app.dataset.scores import answer_hash
from app.rows import RowError


@dataclass(frozen=True, slots=True)
class Panel:
    prompt: Prompt
    answers: Sequence[Answer]
    """By their models' names; none has failed."""

    def lettered(self, seed: int) -> dict[str, Answer]:
        """Shuffled by the seed and the prompt's id, the same in every process."""
        shuffled = list(self.answers)
        random.Random(f"{seed} {self.prompt.prompt_id}").shuffle(shuffled)
        return dict(zip(LETTERS, shuffled, strict=False))

    def is_judged(self, scored: Mapping[tuple[str, str], str | None]) -> bool:
        """``scored``: hashes of the answers that have a score, by prompt id and model."""
        return all(scored.get(answer.key) == answer_hash(answer) for answer in self.answers)


def panels(answers: Iterable[Answer]) -> list[Panel]:
    """Prompts without an answer have none. RowError for more answers than there are letters."""
    by_prompt: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.text is not None:
            by_prompt.setdefault(answer.prompt.prompt_id, []).append(answer)
    for prompt_id, together in by_prompt.items():
        together.sort(key=lambda answer: answer.model)
        if len(together) > len(LETTERS):
            raise RowError(
                f"prompt {prompt_id!r} has {len(together)} answers: "
                f"at most {len(LETTERS)} can be judged together"
            )
    return [Panel(together[0].prompt, together) for together in by_prompt.values()]
