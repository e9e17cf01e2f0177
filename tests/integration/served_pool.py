"""A pool served by the real command in a session of its own, and how tests look at it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
import ray
import yaml

from sfs_ext import SnapshotReader

ROOT = Path(__file__).parents[2]
SERVE = Path(sys.executable).with_name("serve")
T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    url: str
    gcs_address: str


def until(what: Callable[[], T | None], timeout_s: float) -> T:
    """The first true value of ``what``, which nothing announces."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := what()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s} s")
        time.sleep(0.01)
    return value


def running(instance_id: str) -> int:
    """Resident requests of an instance, by its own snapshot."""
    snapshot = SnapshotReader(f"/dev/shm/foretoken-{instance_id}").read()
    return 0 if snapshot is None else len(snapshot.residents)


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


@contextlib.contextmanager
def serve_pool(pool: Path, folder: Path, ready_within_s: float = 180) -> Iterator[Server]:
    """``serve run`` with the project's own configuration, on free ports and a cluster of its own.

    Waits until every model is served; leaves no process behind, or fails.
    """
    http_port = free_port()
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": http_port}
    config["applications"][0]["args"]["pool"] = str(pool)
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    # Short: Ray's sockets lie below it, and a socket's path has at most 107 characters.
    ray_folder = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    environment = {
        **os.environ,
        "RAY_ADDRESS": "local",
        "RAY_TMPDIR": str(ray_folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # As `make serve` has it.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    }
    log = folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(SERVE), "run", str(folder / "serve.yaml")],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{http_port}"
    try:
        with _log_on_failure(log):
            until(lambda: process.poll() is not None or _healthy(url), ready_within_s)
            if process.poll() is not None:
                raise RuntimeError(f"serve run ended with {process.returncode}")
        [port_file] = (ray_folder / "ray/session_latest").glob("gcs_server_port_*")
        yield Server(url, f"{ray.util.get_node_ip_address()}:{port_file.read_text()}")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            with contextlib.suppress(TimeoutError):
                until(lambda: not _session(process.pid), timeout_s=10)
            left = _session(process.pid)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(ray_folder, ignore_errors=True)
    if left:
        raise RuntimeError(f"processes left behind: {left}")


@contextlib.contextmanager
def _log_on_failure(log: Path) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, RuntimeError) as error:
        error.add_note(log.read_text())
        raise


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _session(leader: int) -> dict[int, str]:
    """Living processes of a session: Ray's workers lead process groups of their own."""
    table = subprocess.run(
        ["ps", "-eo", "pid=,sid=,stat=,comm="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=3) for line in table.splitlines()]
    return {
        int(pid): name for pid, sid, state, name in rows if int(sid) == leader and "Z" not in state
    }
