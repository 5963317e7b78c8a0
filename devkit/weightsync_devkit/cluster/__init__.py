"""A real one-node Kubernetes on one Linux machine, without Docker: built from source, run in private namespaces.

``python -m weightsync_devkit.cluster up`` starts etcd, API server, controllers, scheduler, containerd, kubelet and kube-proxy under
one recorded process with its own mount, cgroup, network, UTS, IPC and PID namespaces; ending that process ends all of it.
``--control-plane`` leaves the node out. Needs root, Go, and a few Debian packages (:data:`build.DEBIAN_PACKAGES`).
"""

from weightsync_devkit.cluster.cluster import Cluster, ClusterError

__all__ = ["Cluster", "ClusterError"]
