"""What an operator may be told. Every field says its unit, its default and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """How the operator works."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty for all of them, which needs a ClusterRole."""
    read_nodes: bool = False
    """Read node labels for the GPU architecture of engines that do not say; needs a ClusterRole."""
    port: int = 8080
    """/metrics, /healthz, /readyz."""
    api_key: str = ""
    """Bearer token for engines that were started with --api-key."""
    settle_seconds: float = 0.05
    """Between the first news and the reconcile, so that a burst of news is one reconcile."""
    resync_seconds: float = 30.0
    """Between full lists, which repair whatever a watch has lost."""
    lag_seconds: float = 10.0
    """A change that a list shows and the watch has not brought within this time means that the watch is silent."""
    silent_resyncs: int = 2
    """Resyncs in a row that found the watch silent before the process asks to be restarted."""
    request_seconds: float = 15.0
    """One call to the API server."""
    probe_seconds: float = 2.0
    """Between two questions to one engine or trainer that answers."""
    retry_seconds: float = 0.25
    """Before an engine that does not answer is asked again; doubles up to ``probe_seconds``."""
    connect_seconds: float = 1.5
    """For a connection to a pod; a pod that is gone does not answer at all."""
    answer_seconds: float = 5.0
    """For an answer of a pod whose connection stands."""
    patience_seconds: float = 30.0
    """An engine that answered once, accepts connections and does not answer is kept this long: busy is not gone."""
    concurrent_probes: int = 64
    """Questions to pods under way at once."""
    concurrent_suspects: int = 8
    """Of those, questions to pods that did not answer in time before, so that hung pods delay only each other."""
    lease: str = ""
    """Name of the Lease that one of several replicas must hold; empty for a single replica."""
    lease_namespace: str = ""
    identity: str = ""
    """This replica's name in the Lease."""
    lease_seconds: int = 15
    """After this time without renewal another replica takes over."""
