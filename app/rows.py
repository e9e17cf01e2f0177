"""Rows of a JSON Lines or Parquet file, each with where it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from app.chat import require_json

PARQUET = ".parquet"

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Form = TypeVar("Form", bound=BaseModel)


class RowError(ValueError):
    """A row, or a whole file, that cannot be used; names the file, the row and why."""


@dataclass(frozen=True, slots=True)
class Row:
    path: Path
    number: int
    """From 1: the line, or the row of a Parquet file."""
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Within its file."""
        return f"{'row' if self.path.suffix == PARQUET else 'line'} {self.number}"

    def __str__(self) -> str:
        return f"{self.path}, {self.place}"

    def error(self, problem: str) -> RowError:
        return RowError(f"{self}: {problem}")

    def read(self, form: type[Form]) -> Form:
        """Raises RowError, which names the first key that is wrong."""
        try:
            return form.model_validate(self.values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise self.error(f"{key.removeprefix('.')}: {message}" if key else message) from error


def read_rows(path: str | Path, torn_end: bool = False) -> Iterator[Row]:
    """What is not named ``*.parquet`` is JSON Lines. Raises RowError, OSError.

    ``torn_end``: a last line that breaks off is left out, for whoever wrote it was killed.
    """
    path = Path(path)
    return _parquet_rows(path) if path.suffix == PARQUET else _json_rows(path, torn_end)


def parse_object(line: bytes) -> dict[str, Any]:
    """One line of JSON. ValueError where it is no object, or holds what is no number (NaN) or no
    character (half a surrogate pair)."""
    try:
        values = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nests too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"is {type(values).__name__}, not a JSON object")
    if _SURROGATE.search(line):
        require_json(values, "the row")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _json_rows(path: Path, torn_end: bool) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                values = parse_object(line)
            except ValueError as error:
                if torn_end and not line.endswith(b"\n"):
                    return
                raise RowError(f"{path}, line {number}: {error}") from error
            yield Row(path, number, values)


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    # Opened outside of what is caught: pyarrow reports a damaged page, too, by an OSError.
    with pa.OSFile(str(path)) as opened:
        try:
            file = pq.ParquetFile(opened)
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(path, number, values)
        except (pa.ArrowException, OSError, ValueError, LookupError, OverflowError) as error:
            raise RowError(f"{path}: {error}") from error
