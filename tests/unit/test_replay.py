"""Workloads in, schedules out: hand-worked examples, and the command line around them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sfs_ext import replay_workload


def workload(**config: Any) -> dict[str, Any]:
    return {
        "config": {"max_num_batched_tokens": 32, "num_blocks": 100} | config,
        "requests": [
            {"id": "a", "arrival": 0, "prompt_len": 40, "output_len": 3},
            {"id": "b", "arrival": 0, "prompt_len": 8, "output_len": 2, "max_tokens": 5},
        ],
    }


def test_chunked_prefill_shares_the_budget_in_arrival_order() -> None:
    # 40 prompt tokens under a budget of 32: 32, then 8 beside the whole of b; the batch that ends
    # a prefill emits the first token. b meets its EOS at 2 of at most 5.
    batches = [step[0] for step in replay_workload(workload())["trace"]]
    assert batches == [
        [["a", 32]],
        [["a", 8], ["b", 8]],
        [["a", 1], ["b", 1]],
        [["a", 1]],
        [],
    ]


def test_blocks_are_counted_and_given_back() -> None:
    trace = replay_workload(workload())["trace"]
    # Usable blocks are 99; 32 tokens take 2 of 16, 40 take 3, b takes 1.
    assert [step[3] for step in trace] == [97, 95, 95, 96, 99]
    assert [step[2] for step in trace] == [[], [], ["b"], ["a"], []]


def test_token_times_follow_the_time_model() -> None:
    result = replay_workload(workload(time_model=[0.01, 0.001]))
    first = 0.01 + 0.032
    second = first + 0.01 + 0.016
    third = second + 0.01 + 0.002
    assert result["token_times"]["a"] == pytest.approx([second, third, third + 0.011])
    assert result["token_times"]["b"] == pytest.approx([second, third])


def test_async_scheduling_wastes_a_slot_behind_an_eos() -> None:
    trace = replay_workload(workload(async_scheduling=True))["trace"]
    decoded = [request for step in trace for request, tokens in step[0] if tokens == 1]
    # Two outputs need one decode; the second was in flight when the EOS came back.
    assert decoded.count("b") == 2


def test_a_shared_prefix_is_computed_once() -> None:
    shared = {"prompt_len": 40, "output_len": 1, "prefix_group": 0, "prefix_len": 32}
    requests = [
        {"id": "a", "arrival": 0, **shared},
        {"id": "b", "arrival": 5, **shared},
    ]
    config = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    trace = replay_workload({"config": config, "requests": requests})["trace"]
    assert [step[0] for step in trace if step[0]] == [[["a", 40]], [["b", 8]]]


def with_aborts(aborts: dict[str, float], **config: Any) -> dict[str, Any]:
    given = workload(**config)
    for request in given["requests"]:
        if request["id"] in aborts:
            request["abort"] = aborts[request["id"]]
    return replay_workload(given)


def test_an_abort_before_a_pass_is_heard_with_its_arrivals() -> None:
    trace = with_aborts({"b": 1})["trace"]
    assert [step[0] for step in trace] == [[["a", 32]], [["a", 8]], [["a", 1]], [["a", 1]], []]


@pytest.mark.parametrize(
    ("clock", "abort"), [({}, 1.5), ({"time_model": [0.01, 0.001]}, 0.01 + 0.032 + 0.005)]
)
def test_an_abort_in_a_batch_is_heard_before_its_results(clock: Any, abort: float) -> None:
    # The second batch ends a's prefill and emits its first token; nobody is there to get it.
    result = with_aborts({"a": abort}, **clock)
    assert [step[0] for step in result["trace"]] == [
        [["a", 32]],
        [["a", 8], ["b", 8]],
        [["b", 1]],
        [],
    ]
    assert result["token_times"].keys() == {"b"}
    # The batch was built with its blocks taken, and came back with them free.
    assert [step[3:5] for step in result["trace"]] == [[97, 97], [95, 98], [98, 99], [99, 99]]
    assert [step[2] for step in result["trace"]] == [[], [], ["b"], []]


def test_async_scheduling_drops_what_two_batches_hold_of_an_aborted_request() -> None:
    # Pass 0 schedules and waits for nothing; pass 1 schedules, and waits for the batch of pass 0.
    result = with_aborts({"a": 1.5, "b": 1.5}, async_scheduling=True)
    assert [step[0] for step in result["trace"]] == [[["a", 32]], [["a", 8], ["b", 8]], []]
    assert result["token_times"] == {}
    assert [step[3:5] for step in result["trace"]] == [[97, 99], [95, 99], [99, 99]]


def test_a_request_that_goes_as_it_comes_costs_the_engine_one_empty_step() -> None:
    trace = with_aborts({"a": 0, "b": 0})["trace"]
    assert trace == [[[], [], [], 99, 99, 0.0]]


def test_an_abort_behind_the_end_changes_nothing() -> None:
    assert with_aborts({"a": 50, "b": 3})["trace"] == replay_workload(workload())["trace"]


def test_unknown_settings_and_repeated_ids_are_named() -> None:
    with pytest.raises(ValueError, match="block_sise"):
        replay_workload(workload(block_sise=16))
    twice = workload()
    twice["requests"][1]["id"] = "a"
    with pytest.raises(ValueError, match="unique"):
        replay_workload(twice)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prompt_len", 0, "never be admitted"),
        ("prompt_len", -500, "never be admitted"),
        ("prompt_len", 9000, "max_model_len 8192"),
        ("output_len", 0, "at least 1"),
        ("max_tokens", -1, "at least 1"),
        ("arrival", float("inf"), "not finite"),
        ("abort", -1, "before arrival 0"),
        ("abort", float("nan"), "before arrival 0"),
        ("parent", "b", "not an earlier one"),
        ("parent", "z", "not an earlier one"),
    ],
)
def test_requests_that_could_never_run_are_refused(field: str, value: object, says: str) -> None:
    given = workload(enable_prefix_caching=True, max_num_batched_tokens=32_768)
    given["requests"][1] |= {field: value}
    with pytest.raises(ValueError, match=says):
        replay_workload(given)


def test_an_unfinished_workload_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="unfinished after 2 steps"):
        replay_workload(workload(), max_steps=2)


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sfs_ext", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("compress", [False, True])
def test_the_command_line_replays_json_lines(tmp_path: Path, compress: bool) -> None:
    lines = "".join(json.dumps(workload() | {"seed": seed}) + "\n" for seed in (1, 2))
    given = tmp_path / "workloads"
    given.write_bytes(gzip.compress(lines.encode()) if compress else lines.encode())
    written = tmp_path / "traces.jsonl"
    done = run_module(str(given), "-o", str(written))
    assert done.returncode == 0, done.stderr
    traces = [json.loads(line) for line in written.read_text().splitlines()]
    assert [trace["seed"] for trace in traces] == [1, 2]
    assert traces[0]["trace"] == replay_workload(workload())["trace"]


def test_the_command_line_replays_one_pretty_object(tmp_path: Path) -> None:
    given = tmp_path / "workload.json"
    given.write_text(json.dumps(workload(), indent=2))
    done = run_module(str(given))
    assert json.loads(done.stdout)["trace"] == replay_workload(workload())["trace"]


def test_the_command_line_names_what_is_wrong(tmp_path: Path) -> None:
    given = tmp_path / "workload.json"
    given.write_text('{"config": {}}')
    done = run_module(str(given))
    assert done.returncode == 1
    assert "requests" in done.stderr
    assert "Traceback" not in done.stderr
    missing = run_module(str(tmp_path / "nowhere.json"))
    assert missing.returncode == 1
    assert "nowhere.json" in missing.stderr
