"""How far a long run has come: a bar on a terminal, now and then a line where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from app.dataset.tally import Tally

LINE_INTERVAL_S = 10.0

Advance = Callable[[], None]


@contextmanager
def progress(doing: str, total: int, tally: Tally) -> Iterator[Advance]:
    """To be called after each of ``total``. Written to standard error."""
    console = Console(stderr=True)
    if console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(doing, total=total, failed=0)
            yield lambda: bar.update(task, advance=1, failed=tally.failed)
    else:
        yield _Lines(console, doing, total, tally).advance


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=console,
    )


class _Lines:
    def __init__(self, console: Console, doing: str, total: int, tally: Tally) -> None:
        self._console, self._doing, self._total, self._tally = console, doing, total, tally
        self._advanced = 0
        self._due_s = time.monotonic() + LINE_INTERVAL_S

    def advance(self) -> None:
        self._advanced += 1
        now_s = time.monotonic()
        if now_s >= self._due_s or self._advanced == self._total:
            self._due_s = now_s + LINE_INTERVAL_S
            self._console.print(
                f"{self._doing}: {self._advanced} of {self._total}, {self._tally.failed} failed",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
