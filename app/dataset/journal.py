"""A JSON Lines file that grows by whole rows, and survives whoever writes it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from app.rows import PARQUET, RowError, parse_object


class Journal:
    """Open for appending, for one process at a time. What breaks off at its end is cut away:
    the process that wrote it was killed."""

    def __init__(self, path: str | Path) -> None:
        """Raises RowError where another process writes into it, OSError."""
        self.path = Path(path)
        if self.path.suffix == PARQUET:
            raise RowError(f"{path}: rows are appended as JSON Lines, not Parquet")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mend_end()
        except BlockingIOError as error:
            self._file.close()
            raise RowError(f"{path}: another process is writing into it") from error
        except BaseException:
            self._file.close()
            raise

    def append(self, *rows: Mapping[str, Any]) -> None:
        """They are in the file, together, when this returns. Raises OSError."""
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
        with self._named():
            self._file.write("".join(lines).encode())
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._named():  # What could not be written is tried once more.
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _mend_end(self) -> None:
        self._file.seek(0)
        last = b""
        for last in self._file:  # noqa: B007
            pass
        if not last or last.endswith(b"\n"):
            return
        try:
            parse_object(last)
        except ValueError:
            self._file.truncate(self._file.seek(0, os.SEEK_END) - len(last))
        else:  # Written by hand, without an end.
            self._file.write(b"\n")
            self._file.flush()
