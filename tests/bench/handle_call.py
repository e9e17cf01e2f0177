"""The median seconds of a Serve handle call that does nothing, by who calls it, as JSON.

``python handle_call.py CALLS FILE``: a process of its own, for it starts and ends a Ray cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

WARM_UP = 100


@serve.deployment
class Nothing:
    async def __call__(self) -> None:
        return None


@serve.deployment
class Caller:
    """Calls from another replica, as an ingress calls an engine."""

    def __init__(self, nothing: DeploymentHandle) -> None:
        self._nothing = nothing

    async def median_s(self, calls: int) -> float:
        return await median_s(self._nothing, calls)


async def median_s(nothing: DeploymentHandle, calls: int) -> float:
    took_s = []
    for _ in range(WARM_UP + calls):
        began_s = time.perf_counter()
        await nothing.remote()
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s[WARM_UP:])


async def medians_s(calls: int) -> dict[str, float]:
    nothing = serve.get_deployment_handle("Nothing", "bench")
    caller = serve.get_deployment_handle("Caller", "bench")
    medians = {
        "replica": await caller.median_s.remote(calls),
        "driver": await median_s(nothing, calls),
    }
    await serve.shutdown_async()
    return medians


if __name__ == "__main__":
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=os.environ["RAY_TMPDIR"],
    )
    serve.run(Caller.bind(Nothing.bind()), name="bench", route_prefix=None)
    medians = asyncio.run(medians_s(int(sys.argv[1])))
    ray.shutdown()
    # Not to the standard output: Ray's processes write there, too.
    Path(sys.argv[2]).write_text(json.dumps(medians))
