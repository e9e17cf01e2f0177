"""Snapshots and KV journals between nodes: one publisher a replica, two subscriptions a replica.

On a node the router reads the shared memory itself. Of snapshots only the newest counts, so they
are conflated; one conflated socket for all replicas would keep only the last replica's, so each has
its own. Of a journal every event counts, so it comes through a second socket, in order. It begins
with a checkpoint, asked for by subscribing to a topic of one's own, and so does it after a gap.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from uuid import uuid4

import zmq

from sfs_ext import Snapshot, SnapshotReader

logger = logging.getLogger("ray.serve")

WATCH_INTERVAL_MS = 2
"""How often a relay with subscribers looks for a new snapshot."""
IDLE_INTERVAL_MS = 200
"""How soon a relay or feed notices that it is to stop."""
ASK_INTERVAL_S = 1.0
"""At most how often a feed asks for a checkpoint of one replica: it may be megabytes, and lost."""

SNAPSHOT_TOPIC = b"FORESNAP"
"""How each snapshot's bytes begin: a conflated socket takes messages of one frame."""
JOURNAL_TOPIC = b"FOREJRNL"
"""How each journal message's bytes begin."""
CHECKPOINT_TOPIC = b"checkpoint/"
"""And something of the subscriber's own: a first frame, before the message's."""


class SnapshotRelay:
    """Sends an engine's snapshots and KV journal to the routers on other nodes, if there are any.

    Each increment of the journal ends where a snapshot does that follows it.
    """

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
        self._subscribers = {SNAPSHOT_TOPIC: 0, JOURNAL_TOPIC: 0}
        self._asking: set[bytes] = set()
        self._sent = 0
        self._journal_sent: int | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot-relay", daemon=True)
        self._thread.start()

    def newest(self) -> bytes | None:
        """None before the first, and for one that contradicts itself: the instance goes stale."""
        snapshot = self._read()
        return None if snapshot is None else snapshot.to_bytes()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _read(self) -> Snapshot | None:
        try:
            return self._reader.read()
        except ValueError as error:
            if not self._refused:
                self._refused = True
                logger.warning("%s: snapshot refused, said once: %s", self._path, error)
            return None

    def _run(self) -> None:
        while not self._stopping.is_set():
            watches = any(self._subscribers.values())
            if self._socket.poll(WATCH_INTERVAL_MS if watches else IDLE_INTERVAL_MS):
                self._take_subscription(self._socket.recv())
            elif watches and (sequence := self._reader.sequence) != self._sent:
                self._sent = sequence
                if (snapshot := self._read()) is not None:
                    self._send(snapshot)
        self._socket.close()

    def _take_subscription(self, message: bytes) -> None:
        joins, topic = message[:1] == b"\x01", message[1:]
        if topic in self._subscribers:
            self._subscribers[topic] += 1 if joins else -1
        elif joins and topic.startswith(CHECKPOINT_TOPIC):
            self._asking.add(topic)
        else:
            self._asking.discard(topic)
        if joins:
            self._sent = 0

    def _send(self, snapshot: Snapshot) -> None:
        if snapshot.header["kv_journaled"]:
            self._send_journal(int(snapshot.header["kv_position"]))
        self._socket.send(snapshot.to_bytes())

    def _send_journal(self, position: int) -> None:
        if not self._subscribers[JOURNAL_TOPIC]:
            self._journal_sent = None
        elif self._journal_sent is None:
            self._journal_sent = position  # what lies before it comes with the checkpoints
        elif position > self._journal_sent:
            # From 0, and for all, where the ring has moved past what was sent.
            increment = self._reader.read_journal_message(self._journal_sent, position)
            if increment is not None:
                self._socket.send(increment.to_bytes())
                self._journal_sent = position
        if self._asking and (checkpoint := self._reader.read_journal_message(0, position)):
            data = checkpoint.to_bytes()
            for topic in self._asking:
                self._socket.send_multipart((topic, data))
            self._asking.clear()


class SnapshotFeed:
    """Receives the snapshots and KV journals of replicas on other nodes, on one thread.

    ``deliver(instance_id, snapshot_bytes)`` and ``deliver_journal(instance_id, message_bytes)``
    are called on that thread. Between the two there is no order: increments may come before or
    after the snapshot at whose position they end. ``deliver_journal`` returns False if the message
    does not follow on what it has, and then gets a checkpoint: a message from 0. Orders come from
    one other thread: the event loop's.
    """

    def __init__(
        self,
        deliver: Callable[[str, bytes], object],
        deliver_journal: Callable[[str, bytes], bool] | None = None,
    ) -> None:
        self._deliver = deliver
        self._deliver_journal = deliver_journal
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
        snapshots: dict[str, zmq.Socket[bytes]] = {}
        journals: dict[str, _JournalSubscription] = {}
        while True:
            ready = dict(poller.poll())
            for journal in journals.values():
                if journal.socket in ready:
                    journal.receive()
            for instance_id, socket in snapshots.items():
                if socket in ready:
                    self._deliver(instance_id, socket.recv())
            if orders not in ready:
                continue
            order = orders.recv_pyobj()
            if order is None:
                break
            instance_id, endpoint = order
            if (old := snapshots.pop(instance_id, None)) is not None:
                poller.unregister(old)
                old.close()
            if (left := journals.pop(instance_id, None)) is not None:
                poller.unregister(left.socket)
                left.socket.close()
            if endpoint is None:
                continue
            snapshots[instance_id] = _subscription(context, endpoint, SNAPSHOT_TOPIC, newest=True)
            poller.register(snapshots[instance_id], zmq.POLLIN)
            if self._deliver_journal is not None:
                deliver = partial(self._deliver_journal, instance_id)
                journals[instance_id] = _JournalSubscription(context, endpoint, deliver)
                poller.register(journals[instance_id].socket, zmq.POLLIN)
        for socket in (*snapshots.values(), *(j.socket for j in journals.values()), orders):
            socket.close()


class _JournalSubscription:
    """One replica's journal: what is delivered begins with a checkpoint, and so after each gap."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        deliver: Callable[[bytes], bool],
    ) -> None:
        self.socket = _subscription(context, endpoint, JOURNAL_TOPIC, newest=False)
        self._topic = CHECKPOINT_TOPIC + uuid4().bytes
        self._deliver = deliver
        self._ask()

    def receive(self) -> None:
        *_, message = self.socket.recv_multipart()  # a checkpoint's topic comes before it
        follows = self._deliver(message)
        if not follows and time.monotonic() - self._asked_s >= ASK_INTERVAL_S:
            self._ask()

    def _ask(self) -> None:
        # Again by the same topic: a late answer to an earlier asking still arrives.
        self._asked_s = time.monotonic()
        self.socket.subscribe(self._topic)


def _subscription(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: bytes, newest: bool
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    # Before connecting, or it does not take effect.
    socket.setsockopt(zmq.CONFLATE, newest)
    socket.setsockopt(zmq.LINGER, 0)
    socket.subscribe(topic)
    socket.connect(endpoint)
    return socket
