"""Each session draws workloads of its own; the environment repeats or widens a draw.

``FORETOKEN_PARITY_SEED`` is the first workload's seed, by default a random one; the others follow.
``FORETOKEN_PARITY_WORKLOADS`` is how many there are.
"""

from __future__ import annotations

import os

import pytest

FIRST_SEED = int(os.environ.get("FORETOKEN_PARITY_SEED", int.from_bytes(os.urandom(4))))
WORKLOADS = int(os.environ.get("FORETOKEN_PARITY_WORKLOADS", "300"))
WORKLOADS_A_CASE = 20


def pytest_report_collectionfinish() -> str:
    return f"vLLM parity: FORETOKEN_PARITY_SEED={FIRST_SEED} FORETOKEN_PARITY_WORKLOADS={WORKLOADS}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_seeds" in metafunc.fixturenames:
        every = range(FIRST_SEED, FIRST_SEED + WORKLOADS)
        cases = [every[at : at + WORKLOADS_A_CASE] for at in range(0, WORKLOADS, WORKLOADS_A_CASE)]
        metafunc.parametrize("case_seeds", cases, ids=range(len(cases)))


@pytest.fixture(scope="session")
def seeds() -> range:
    return range(FIRST_SEED, FIRST_SEED + WORKLOADS)
