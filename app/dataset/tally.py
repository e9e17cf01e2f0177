"""What came of a run's calls, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """By kind."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first sentence of each kind."""

    def fail(self, kind: str, sentence: str) -> None:
        self.failures[kind] += 1
        self.examples.setdefault(kind, sentence)

    @property
    def failed(self) -> int:
        return self.failures.total()

    def failure_lines(self) -> list[str]:
        return [
            f"{count} failed: {kind}, as in: {self.examples[kind]}"
            for kind, count in self.failures.most_common()
        ]
