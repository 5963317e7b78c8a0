"""Where the cluster keeps its files, and the numbers that its parts agree on."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

NODE = "node1"
NODE_IP = "198.18.0.1"
"""From RFC 2544's range; exists only inside the namespace."""
POD_CIDR, SERVICE_CIDR = "198.18.64.0/18", "198.19.0.0/24"
API_SERVICE_IP = str(ipaddress.ip_network(SERVICE_CIDR)[1])

CGROUPS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
"""Hierarchies of cgroup v1 that containers are held in."""

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_PARTS = ("containerd", "kubelet", "kube-proxy")


@dataclass(frozen=True)
class Places:
    """Folders of one cluster; ``root`` must be short, since sockets lie below it."""

    root: Path
    port: int
    """The API server's port on 127.0.0.1 of this machine."""

    @property
    def bin(self) -> Path:
        """Programs."""
        return self.root / "bin"

    @property
    def images(self) -> Path:
        """Image archives that every node gets."""
        return self.root / "images"

    @property
    def data(self) -> Path:
        """All that a running cluster writes; removed when it goes down."""
        return self.root / "data"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.data / "pki"

    @property
    def conf(self) -> Path:
        """Configuration files."""
        return self.data / "conf"

    @property
    def logs(self) -> Path:
        """One log for each part."""
        return self.data / "logs"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's, for use outside."""
        return self.conf / "admin.kubeconfig"

    @property
    def control_socket(self) -> Path:
        """Where the first process of the namespaces takes orders."""
        return self.data / "control.sock"

    @property
    def containerd_socket(self) -> Path:
        """The container runtime's."""
        return self.data / "containerd.sock"


def default_places() -> Places:
    """WEIGHTSYNC_CLUSTER_DIR (default ``.cluster`` of this checkout) and WEIGHTSYNC_CLUSTER_PORT (default 16443)."""
    checkout = Path(__file__).parents[3]
    root = Path(os.environ.get("WEIGHTSYNC_CLUSTER_DIR", checkout / ".cluster")).absolute()
    return Places(root, int(os.environ.get("WEIGHTSYNC_CLUSTER_PORT", "16443")))
