"""Snapshots, files and questions that make no sense: refused by name, or answered believably."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sfs_ext import (
    BatchTime,
    Fleet,
    ForecastStatus,
    KvEventKind,
    SchedulerConfig,
    Snapshot,
    SnapshotReader,
    SnapshotWriter,
    batch_dtype,
    block_keys,
    kv_event_dtype,
    query_dtype,
    resident_dtype,
    snapshot_dtype,
    step_dtype,
)

CONFIG = SchedulerConfig(
    max_num_batched_tokens=512,
    max_num_seqs=8,
    block_size=16,
    num_blocks=501,
    max_model_len=4096,
    async_scheduling=True,
)
BATCH_TIME = BatchTime(4e-3, 1e-5, 1e-8, 1e-10)
NOW_S = 1.8e9
INT32 = st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 2**28, 4095, 4096]) | st.integers(
    -(2**31), 2**31 - 1
)
TIMES = st.floats() | st.sampled_from([NOW_S, NOW_S - 1, NOW_S + 1e-3])


def residents(running: int, waiting: int) -> NDArray[np.void]:
    """Running ones half-way through their answers, each in both of the batches in flight."""
    rows = np.zeros(running + waiting, resident_dtype)
    rows["id"] = np.arange(1, len(rows) + 1)
    rows["arrival_s"] = NOW_S - 1
    rows["prompt_tokens"] = 100
    rows["max_tokens"] = 50
    rows["predicted_output_tokens"] = 40
    rows["status"][running:] = 1
    rows["output_tokens"][:running] = 20
    rows["placeholders"][:running] = 2
    rows["computed_tokens"][:running] = 121
    rows["blocks"][:running] = 8
    rows["in_flight_tokens"][:running] = 1
    rows["in_flight_emits"][:running] = 1
    return rows


def batches(running: int) -> NDArray[np.void]:
    rows = np.zeros(2, batch_dtype)
    rows["started_s"] = [NOW_S - 1e-3, math.nan]
    rows["tokens"] = running
    rows["decode_context_tokens"] = 120 * running
    return rows


def publish(path: Path, rows: NDArray[np.void], config: SchedulerConfig = CONFIG) -> bytes:
    writer = SnapshotWriter(str(path), config, max_residents=max(len(rows), 1), max_steps=4)
    running = int(np.count_nonzero(rows["status"] == 0))
    in_flight = batches(running) if running else batches(0)[:0]
    writer.publish(NOW_S, 501 - 1 - 8 * running, in_flight, rows)
    snapshot = SnapshotReader(str(path)).read()
    writer.close()
    assert snapshot is not None
    return snapshot.to_bytes()


@pytest.fixture(scope="module")
def message(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return publish(tmp_path_factory.mktemp("sound") / "engine", residents(4, 6))


def ask(**changed: Any) -> NDArray[np.void]:
    query = np.zeros(1, query_dtype)
    fields = {"prompt_tokens": 100, "max_tokens": 50, "arrival_s": NOW_S} | changed
    for name, value in fields.items():
        query[name] = value
    return query


def check_believable(forecast: np.void) -> None:
    assert forecast["batches"] >= 0
    if forecast["status"] == ForecastStatus.OK:
        assert math.isfinite(forecast["ttft_s"])
        assert forecast["prefill_s"] >= 0
        assert forecast["ttft_s"] == forecast["waiting_s"] + forecast["prefill_s"]
    else:
        assert forecast["status"] in list(ForecastStatus)
        assert forecast["ttft_s"] == math.inf


def fleet_of(message: bytes, config: SchedulerConfig = CONFIG) -> Fleet:
    fleet = Fleet()
    fleet.add(config, BATCH_TIME)
    assert fleet.update(0, message)
    return fleet


def check_refused_or_believable(message: bytes) -> None:
    try:
        Snapshot.from_bytes(message)
    except ValueError:
        with pytest.raises(ValueError, match=r"snapshot|scheduler config"):
            fleet_of(message)
        return
    fleet = Fleet()
    fleet.add(CONFIG, BATCH_TIME)
    if fleet.update(0, message):
        check_believable(fleet.forecast(NOW_S, ask())[0])


@given(
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 10_000),
    is_cut=st.booleans(),
)
def test_bytes(message: bytes, edits: list[tuple[int, int]], cut: int, is_cut: bool) -> None:
    data = bytearray(message)
    for at, byte in edits:
        data[at % len(data)] = byte
    check_refused_or_believable(bytes(data[: cut % len(data)]) if is_cut else bytes(data))


def numbers(dtype: np.dtype[Any]) -> Iterator[tuple[str, st.SearchStrategy[Any]]]:
    for name, (field, *_) in (dtype.fields or {}).items():
        if field.base.kind == "f":
            yield name, st.floats(width=8 * field.base.itemsize)
        elif field.base.kind in "iu":
            limits = np.iinfo(field.base)
            small = st.integers(max(-1, int(limits.min)), 60)
            yield name, small | st.integers(int(limits.min), int(limits.max))


RESIDENT_NUMBERS = dict(numbers(resident_dtype))
HEADER_NUMBERS = dict(numbers(snapshot_dtype))


@given(data=st.data(), edits=st.integers(1, 3))
def test_fields(message: bytes, data: st.DataObject, edits: int) -> None:
    snapshot = Snapshot.from_bytes(message)
    rows = snapshot.residents
    begin = len(message) - rows.nbytes - snapshot_dtype.itemsize
    header = np.array([snapshot.header], snapshot_dtype)
    for _ in range(edits):
        if data.draw(st.integers(0, 3)) == 0:
            name = data.draw(st.sampled_from(sorted(HEADER_NUMBERS)))
            header[name] = data.draw(HEADER_NUMBERS[name])
        else:
            name = data.draw(st.sampled_from(sorted(RESIDENT_NUMBERS)))
            row = data.draw(st.integers(0, len(rows) - 1))
            rows[name][row] = data.draw(RESIDENT_NUMBERS[name])
    check_refused_or_believable(message[:begin] + header.tobytes() + rows.tobytes())


@given(
    instance=INT32,
    query=st.fixed_dictionaries(
        {
            "prompt_tokens": INT32,
            "max_tokens": INT32,
            "priority": INT32,
            "predicted_output_tokens": st.floats(),
            "arrival_s": TIMES,
        }
    ),
    now_s=TIMES,
)
def test_questions(message: bytes, instance: int, query: dict[str, Any], now_s: float) -> None:
    fleet = fleet_of(message)
    for number in (0, instance):
        try:
            check_believable(fleet.forecast(now_s, ask(instance=number, **query))[0])
            loads = fleet.loads(now_s, ask(instance=number, **query))
            assert loads["ttft_s"] >= 0
            assert loads["least_ttft_s"] >= 0
        except ValueError as refusal:
            assert "time" in str(refusal)  # noqa: PT017 - it may as well be answered
        except IndexError as unknown:
            assert number != 0 and str(number) in str(unknown)  # noqa: PT017 - as above


@given(
    instance=INT32,
    key=st.integers(0, 2**64 - 1),
    booking=st.tuples(TIMES, INT32, st.floats(), INT32, INT32),
)
def test_bookings(
    message: bytes, instance: int, key: int, booking: tuple[float, int, float, int, int]
) -> None:
    fleet = fleet_of(message)
    before = fleet.forecast(NOW_S, ask())
    if instance != 0:
        with pytest.raises(IndexError, match=f"no instance {instance}"):
            fleet.book(instance, key, *booking)
    booked = True
    try:
        fleet.book(0, key, *booking)
    except ValueError:
        booked = False
    check_believable(fleet.forecast(NOW_S, ask())[0])
    assert fleet.unbook(0, key) == booked
    assert fleet.forecast(NOW_S, ask()).tobytes() == before.tobytes()


def test_a_booking_that_never_comes_is_refused(message: bytes) -> None:
    for arrival_s in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="no time"):
            fleet_of(message).book(0, 7, arrival_s, 100, 10.0, 50)


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 600) | st.integers(0, 2**16),
            st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    steps_after=st.sampled_from([0, 1, 2**63, 2**64 - 1]),
)
def test_files(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int, bool]], steps_after: int
) -> None:
    """Changed before a reader opens them, or under its eyes."""
    path = tmp_path_factory.mktemp("file") / "engine"
    writer = SnapshotWriter(str(path), CONFIG, max_residents=16, max_steps=4)
    for _ in range(2):
        writer.publish(NOW_S, 400, batches(4), residents(4, 6))
        writer.record_step(np.zeros(1, step_dtype))

    def corrupt(opened: bool) -> None:
        with open(path, "r+b") as file:
            for at, word, when in edits:
                if when == opened:
                    file.seek(at // 8 * 8 % path.stat().st_size)
                    file.write(word.to_bytes(8, "little"))

    def read(reader: SnapshotReader) -> None:
        try:
            if (snapshot := reader.read()) is not None:
                check_refused_or_believable(snapshot.to_bytes())
        except ValueError:
            pass
        assert all(step["sequence"] > steps_after for step in reader.read_steps(steps_after))

    corrupt(opened=False)
    try:
        reader = SnapshotReader(str(path))
    except ValueError:
        return
    fleet = Fleet()
    fleet.add(CONFIG, BATCH_TIME)
    fleet.attach(0, str(path))
    read(reader)
    corrupt(opened=True)
    read(reader)
    check_believable(fleet.forecast(NOW_S, ask())[0])
    writer.close()


def test_a_file_may_be_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    writer = SnapshotWriter(str(path), CONFIG, max_residents=4, max_steps=2)
    writer.publish(NOW_S, 400, batches(0), residents(0, 3))
    whole = path.read_bytes()
    writer.close()
    for length in range(0, len(whole), 40):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="snapshot file"):
            SnapshotReader(str(path))


# What a simulation may look at takes some tens of milliseconds.
BOUND_S = 5.0


@pytest.fixture
def bounded() -> Iterator[None]:
    begun_s, begun_kb = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.thread_time() - begun_s < BOUND_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun_kb < 200_000


def too_long(rows: NDArray[np.void]) -> None:
    """Prompts beyond the context: they run for ever, or wait for ever."""
    rows["prompt_tokens"] = 5000


def for_ever(rows: NDArray[np.void]) -> None:
    rows["max_tokens"] = 2**28
    rows["predicted_output_tokens"] = 0


def without_blocks(rows: NDArray[np.void]) -> None:
    """All running, with nothing in the cache: each takes a block from another."""
    rows["computed_tokens"] = 0
    rows["blocks"] = 0
    rows["status"] = 0
    rows["output_tokens"] = 0


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("change", [too_long, for_ever, without_blocks])
@pytest.mark.parametrize("running", [0, 8, 8000])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_simulation_is_bounded_whatever_it_holds(
    change: Callable[[NDArray[np.void]], None], running: int, policy: str, tmp_path: Path
) -> None:
    rows = residents(running, 8000)
    change(rows)
    config = SchedulerConfig(
        max_num_batched_tokens=8192,
        max_num_seqs=10_000,
        block_size=16,
        num_blocks=64_001,
        max_model_len=4096,
        policy=policy,
        async_scheduling=True,
    )
    writer = SnapshotWriter(str(tmp_path / "engine"), config, max_residents=20_000)
    holders = int(np.count_nonzero(rows["status"] == 0))
    writer.publish(NOW_S, 0, batches(min(holders, 8000)), rows)
    fleet = Fleet()
    fleet.add(config, BATCH_TIME)
    fleet.attach(0, str(tmp_path / "engine"))
    writer.close()
    check_believable(fleet.forecast(NOW_S, ask())[0])


def test_tokens_that_were_in_flight_before_a_preemption_are_in_flight(message: bytes) -> None:
    """Else the request would be stepped over for ever, and all that wait looked at in each step."""
    snapshot = Snapshot.from_bytes(message)
    rows = snapshot.residents
    rows["stale_tokens"][5] = 1
    with pytest.raises(ValueError, match="resident 5: stale_tokens"):
        Snapshot.from_bytes(message[: -rows.nbytes] + rows.tobytes())


JOURNALED = SchedulerConfig(
    max_num_batched_tokens=512, max_num_seqs=8, block_size=16, num_blocks=501, max_model_len=4096
)
PROMPT = np.arange(100, dtype=np.int32)


class Journaled:
    """An engine that holds one prompt's blocks, told of to a fleet message by message."""

    def __init__(self, path: Path) -> None:
        keys = block_keys(PROMPT, 16)
        events = np.zeros(1 + 2 * len(keys), kv_event_dtype)
        events["kind"][0] = KvEventKind.WANT
        events["kind"][1::2], events["kind"][2::2] = KvEventKind.TAKE, KvEventKind.HASH
        events["value"][0], events["value"][1::2], events["value"][2::2] = 1, 1, keys
        events["block"][1::2] = events["block"][2::2] = np.arange(1, len(keys) + 1)
        row = residents(1, 0)
        row["prompt_tokens"], row["blocks"] = 16 * len(keys), len(keys)
        row["computed_tokens"], row["output_tokens"] = 16 * len(keys), 0
        row["placeholders"] = row["in_flight_tokens"] = row["in_flight_emits"] = 0
        writer = SnapshotWriter(str(path), JOURNALED, 4, 4, kv_journaled=True)
        writer.append(events)
        writer.publish(NOW_S, 500 - len(keys), np.zeros(0, batch_dtype), row)
        reader = SnapshotReader(str(path))
        snapshot, journal = reader.read(), reader.read_journal_message(0)
        writer.close()
        assert snapshot is not None
        assert journal is not None
        self.snapshot, self.journal = snapshot.to_bytes(), journal.to_bytes()
        self.position = journal.to_position

    def fleet(self) -> Fleet:
        fleet = fleet_of(self.snapshot, JOURNALED)
        assert fleet.update_journal(0, self.journal)
        return fleet


@pytest.fixture
def journaled(tmp_path: Path) -> Journaled:
    return Journaled(tmp_path / "journaled")


def test_a_gap_in_the_journal_is_a_cache_not_known(journaled: Journaled) -> None:
    fleet = journaled.fleet()
    assert fleet.forecast(NOW_S, ask(), [PROMPT])[0]["cached_tokens"] == 96
    # from, to and no events: these stand behind magic, layout and num_blocks.
    far = np.array([journaled.position + 5] * 2, np.uint64).tobytes()
    gap = journaled.journal[:16] + far + np.uint64(0).tobytes()
    assert not fleet.update_journal(0, gap)
    [forecast] = fleet.forecast(NOW_S, ask(), [PROMPT])
    check_believable(forecast)
    assert forecast["cached_tokens"] == 0
    assert fleet.update_journal(0, journaled.journal)
    assert fleet.forecast(NOW_S, ask(), [PROMPT])[0]["cached_tokens"] == 96


@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4))
def test_journals(tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]) -> None:
    journaled = Journaled(tmp_path_factory.mktemp("journal") / "engine")
    data = bytearray(journaled.journal)
    for at, byte in edits:
        data[at % len(data)] = byte
    fleet = fleet_of(journaled.snapshot, JOURNALED)
    for journal in (bytes(data), journaled.journal):
        try:
            fleet.update_journal(0, journal)
        except ValueError as refusal:
            assert "journal" in str(refusal)  # noqa: PT017 - it may as well be taken
        check_believable(fleet.forecast(NOW_S, ask(), [PROMPT])[0])


@pytest.mark.usefixtures("bounded")
def test_a_mirror_is_no_larger_than_any_engine(journaled: Journaled) -> None:
    """A snapshot, and a journal, of 2**31 - 1 blocks: 100 GB of them."""
    fleet = Fleet()
    fleet.add(JOURNALED, BATCH_TIME)
    num_blocks = np.int32(2**31 - 1).tobytes()
    at = 16 + 4 * 4  # of the snapshot's, in its config
    fleet.update(0, journaled.snapshot[:at] + num_blocks + journaled.snapshot[at + 4 :])
    fleet.update_journal(0, journaled.journal[:12] + num_blocks + journaled.journal[16:])
    [forecast] = fleet.forecast(NOW_S, ask(), [PROMPT])
    check_believable(forecast)
    assert forecast["cached_tokens"] == 0
