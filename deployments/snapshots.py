"""Snapshots between nodes: one publisher a replica, one conflated subscription a replica.

On a node the router reads the shared memory itself. One conflated socket for all replicas would
keep only the last replica's snapshot, so each has its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import zmq

from sfs_ext import SnapshotReader

logger = logging.getLogger("ray.serve")

WATCH_INTERVAL_MS = 2
"""How often a relay with subscribers looks for a new snapshot."""
IDLE_INTERVAL_MS = 200
"""How soon a relay or feed notices that it is to stop."""


class SnapshotRelay:
    """Sends an engine's snapshots to the routers on other nodes, if there are any."""

    def __init__(self, snapshot_path: str, node_ip: str) -> None:
        self._path = snapshot_path
        self._reader = SnapshotReader(snapshot_path)
        self._refused = False
        self._socket = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Each new subscriber is told to us, not only the first: it needs what is current.
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)
        port = self._socket.bind_to_random_port(f"tcp://{node_ip}")
        self.endpoint = f"tcp://{node_ip}:{port}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot-relay", daemon=True)
        self._thread.start()

    def newest(self) -> bytes | None:
        """None before the first, and for one that contradicts itself: the instance goes stale."""
        try:
            snapshot = self._reader.read()
        except ValueError as error:
            if not self._refused:
                self._refused = True
                logger.warning("%s: snapshot refused, said once: %s", self._path, error)
            return None
        return None if snapshot is None else snapshot.to_bytes()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        subscribers = 0
        sent = 0
        while not self._stopping.is_set():
            if self._socket.poll(WATCH_INTERVAL_MS if subscribers else IDLE_INTERVAL_MS):
                joined = self._socket.recv()[:1] == b"\x01"
                subscribers += 1 if joined else -1
                sent = 0 if joined else sent
            if not subscribers or (sequence := self._reader.sequence) == sent:
                continue
            sent = sequence
            if (data := self.newest()) is not None:
                self._socket.send(data)
        self._socket.close()


class SnapshotFeed:
    """Receives the snapshots of replicas on other nodes, on one thread.

    ``deliver(instance_id, snapshot_bytes)`` is called on that thread. Orders come from one other
    thread: the event loop's.
    """

    def __init__(self, deliver: Callable[[str, bytes], object]) -> None:
        self._deliver = deliver
        address = f"inproc://snapshot-feed-{id(self)}"
        self._orders = zmq.Context.instance().socket(zmq.PAIR)
        self._orders.bind(address)
        self._thread = threading.Thread(
            target=self._run, args=(address,), name="snapshot-feed", daemon=True
        )
        self._thread.start()

    def subscribe(self, instance_id: str, endpoint: str) -> None:
        self._orders.send_pyobj((instance_id, endpoint))

    def unsubscribe(self, instance_id: str) -> None:
        """Does nothing for an instance without a subscription."""
        self._orders.send_pyobj((instance_id, None))

    def stop(self) -> None:
        self._orders.send_pyobj(None)
        self._thread.join()
        self._orders.close()

    def _run(self, address: str) -> None:
        context = zmq.Context.instance()
        orders = context.socket(zmq.PAIR)
        orders.connect(address)
        poller = zmq.Poller()
        poller.register(orders, zmq.POLLIN)
        subscriptions: dict[str, zmq.Socket[bytes]] = {}
        while True:
            ready = dict(poller.poll())
            for instance_id, socket in subscriptions.items():
                if socket in ready:
                    self._deliver(instance_id, socket.recv())
            if orders not in ready:
                continue
            order = orders.recv_pyobj()
            if order is None:
                break
            instance_id, endpoint = order
            if (old := subscriptions.pop(instance_id, None)) is not None:
                poller.unregister(old)
                old.close()
            if endpoint is not None:
                subscriptions[instance_id] = _subscription(context, endpoint)
                poller.register(subscriptions[instance_id], zmq.POLLIN)
        for socket in (*subscriptions.values(), orders):
            socket.close()


def _subscription(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    # Before connecting, or it does not take effect.
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket
