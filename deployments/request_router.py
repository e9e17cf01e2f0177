"""Serve's own router within one deployment: it honours the replica that was picked."""

from __future__ import annotations

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PickedReplicaRouter(RequestRouter):
    """Sends a call to the replica its keyword ``replica_id`` names, or fails at once.

    The pick was made from the engines' state; Serve's queue lengths have nothing to add to it.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        wanted = pending_request.kwargs["replica_id"]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == wanted]]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # Serve's own loop waits and probes until some replica has room, and would wait without end
        # for one that is gone. A retry means that the picked one could not be reached.
        wanted = pending_request.kwargs["replica_id"]
        if is_retry:
            # Not one of its subclasses, upon which Serve would retry without end.
            raise RayActorError(error_msg=f"replica {wanted} cannot be reached")
        [picked] = await self.choose_replicas(list(self.curr_replicas.values()), pending_request)
        if not picked:
            raise ReplicaUnavailableError(wanted)
        return picked[0]
