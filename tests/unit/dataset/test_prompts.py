from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.dataset.prompts import Prompt, read_prompts
from app.rows import RowError, read_rows

Write = Callable[..., Path]

HI = {"role": "user", "content": "Hi"}


def contents(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages]


def test_a_prompt_is_text_or_messages(write: Write) -> None:
    chat = [{"role": "system", "content": "Be brief."}, HI]
    path = write(
        "prompts.jsonl",
        {"id": "a", "prompt": "Hi", "task": "chat", "reference": "Hello", "origin": "ours"},
        {"id": 7, "messages": chat},
    )

    text, messages = read_prompts(path)

    assert (text.prompt_id, text.messages) == ("a", (HI,))
    assert (text.task, text.reference) == ("chat", "Hello")
    assert (messages.prompt_id, messages.messages) == ("7", tuple(chat))
    assert (messages.task, messages.reference) == (None, None)


def test_without_an_id_it_follows_from_the_messages_alone(write: Write) -> None:
    (text,) = read_prompts(write("a.jsonl", {"prompt": "Hi", "task": "chat"}))
    (messages,) = read_prompts(write("b.jsonl", {"messages": [HI]}))
    (other,) = read_prompts(write("c.jsonl", {"prompt": "Ho"}))

    assert text.prompt_id == messages.prompt_id == "e15d0b346576fafa"
    assert other.prompt_id != text.prompt_id


def test_the_same_prompt_twice_is_one(write: Write) -> None:
    path = write(
        "prompts.jsonl",
        {"prompt": "Hi"},
        {"messages": [HI]},
        {"id": "again", "prompt": "Hi"},
        {"prompt": "Ho"},
    )

    assert [contents(prompt) for prompt in read_prompts(path)] == [["Hi"], ["Ho"]]


def test_parquet_holds_the_same_prompts(write: Write, tmp_path: Path) -> None:
    named = [{"role": "user", "content": "Hi", "name": "Ann"}]
    table = [{"messages": [HI], "task": "chat"}, {"messages": named, "task": None}]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "prompts.parquet")

    from_parquet = read_prompts(tmp_path / "prompts.parquet")

    assert from_parquet == read_prompts(write("prompts.jsonl", *table))
    assert from_parquet[0].messages == (HI,), "no name: null"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"task": "chat"}, "either prompt"),
        ({"prompt": "Hi", "messages": [HI]}, "either prompt"),
        ({"prompt": ""}, "prompt: "),
        ({"prompt": 3}, "prompt: "),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"id": "", "prompt": "Hi"}, "id: must not be empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, r"messages\[0\].role is 'wizard'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content"),
        ({"prompt": "Hi", "reference": 4}, "reference: "),
        ("[1]\n", "is list, not a JSON object"),
        ('{"prompt": "Hi"\n', "delimiter"),
        ('{"prompt": NaN}\n', "NaN is not JSON"),
        ('{"prompt": "Hi"', "delimiter"),
    ],
)
def test_an_error_names_file_and_line(write: Write, row: Any, problem: str) -> None:
    path = write("prompts.jsonl", {"prompt": "first"}, "\n", row)

    with pytest.raises(RowError, match=rf"prompts\.jsonl, line 3: .*{problem}"):
        read_prompts(path)


def test_one_id_is_one_prompt(write: Write) -> None:
    path = write("prompts.jsonl", {"id": "a", "prompt": "Hi"}, {"id": "a", "prompt": "Ho"})

    with pytest.raises(RowError, match=r"line 2: prompt 'a' has other messages .* line 1"):
        read_prompts(path)


def test_an_error_in_parquet_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": ["Hi", None]}), path)

    with pytest.raises(RowError, match=r"prompts\.parquet, row 2: "):
        read_prompts(path)


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    path.write_text("no")

    with pytest.raises(RowError, match=r"prompts\.parquet: "):
        list(read_rows(path))


def bad_text() -> pa.Array:
    buffers = pa.array(["Hi", "HiHo"]).buffers()
    return pa.Array.from_buffers(pa.string(), 2, [*buffers[:2], pa.py_buffer(b"HiHi\xffo")])


def test_what_is_no_utf_8_in_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": bad_text()}), path)

    with pytest.raises(RowError, match=r"prompts\.parquet: .*utf-8"):
        list(read_rows(path))


def test_a_time_that_python_has_not_in_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"at": pa.array([2**62], pa.timestamp("us"))}), path)

    with pytest.raises(RowError, match=r"prompts\.parquet: "):
        list(read_rows(path))


def test_a_damaged_page_of_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [f"Hi {i}" for i in range(1000)]}), path)
    written = bytearray(path.read_bytes())
    written[40:400] = bytes(360)
    path.write_bytes(written)

    with pytest.raises(RowError, match=r"prompts\.parquet: "):
        list(read_rows(path))


def test_a_file_that_is_not_there_is_no_bad_row(tmp_path: Path) -> None:
    for name in ("prompts.parquet", "prompts.jsonl"):
        with pytest.raises(FileNotFoundError, match=name):
            list(read_rows(tmp_path / name))


def test_lines_end_where_json_lines_end_them(write: Write) -> None:
    path = write("prompts.jsonl", '{"prompt": "a\u2028b"}\r\n', '{"prompt": "c"}')

    assert [contents(prompt) for prompt in read_prompts(path)] == [["a\u2028b"], ["c"]]
