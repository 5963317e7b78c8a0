"""The Lease that one of several replicas must hold; the official client's lock, mended where it breaks."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import ClientError
from kubernetes.aio import client
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

_NO_ANSWER = (ClientError, OSError, asyncio.TimeoutError)


class ReplicaLease(LeaseLock):
    """A lock for :class:`kubernetes.aio.leaderelection.leaderelection.LeaderElection`."""

    async def get(self, name: str, namespace: str) -> Any:
        """As the client's, but an API server that is away is a try that failed and not the end of the election."""
        try:
            return await super().get(name, namespace)
        except _NO_ANSWER as error:
            return False, client.ApiException(status=0, reason=f"{type(error).__name__}: {error}")

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        """As the client's, which passes a flag that its own validation refuses (seen in 37.0.2)."""
        body = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, body)
        except (client.ApiException, *_NO_ANSWER):
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """As the client's, see ``get``."""
        try:
            return bool(await super().update(name, namespace, updated_record))
        except _NO_ANSWER:
            return False
