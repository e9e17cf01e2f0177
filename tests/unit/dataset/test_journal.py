from __future__ import annotations

from pathlib import Path

import pytest

from app.dataset.journal import Journal
from app.rows import RowError


def test_rows_are_in_the_file_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with Journal(path) as journal:
        journal.append({"a": 1}, {"a": 2})
        assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
    with Journal(path) as journal:
        journal.append({"a": 3})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ("", ""),
        ('{"a": 1}\n', '{"a": 1}\n'),
        ('{"a": 1}\n{"a": ', '{"a": 1}\n'),
        ('{"a"', ""),
        ('{"a": 1}\n{"a": 2}', '{"a": 1}\n{"a": 2}\n'),
        ('{"a": 1}\n\u2713'[:-1] + "\udce2", '{"a": 1}\n'),
    ],
)
def test_what_breaks_off_at_the_end_is_cut_away(tmp_path: Path, found: str, kept: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(found.encode(errors="surrogateescape"))

    with Journal(path) as journal:
        journal.append({"a": 9})

    assert path.read_text() == kept + '{"a": 9}\n'


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path), pytest.raises(RowError, match="another process is writing"):
        Journal(path)
    with Journal(path):
        pass


def test_nothing_is_appended_to_parquet(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="JSON Lines, not Parquet"):
        Journal(tmp_path / "rows.parquet")
