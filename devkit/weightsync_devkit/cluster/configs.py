"""Configuration files and command lines of Kubernetes' parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync_devkit.cluster.places import NODE, NODE_IP, POD_CIDR, SERVICE_CIDR, Places

_INSIDE = "https://127.0.0.1:6443"
_KUBELET_SYNC = "5s"
"""How often the kubelet refreshes mounted ConfigMaps; its default of a minute would only make tests slow."""


def write_configs(places: Places) -> None:
    """Write every file that :func:`commands` names."""
    conf, data = places.conf, places.data
    conf.mkdir(parents=True, exist_ok=True)
    for user in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"):
        _write_kubeconfig(places, conf / f"{user}.kubeconfig", user, _INSIDE)
    _write_kubeconfig(places, places.kubeconfig, "admin", f"https://127.0.0.1:{places.port}")
    (conf / "resolv.conf").write_text("")
    _write_json(conf / "kubelet.json", _kubelet(places))
    _write_json(conf / "kube-proxy.json", {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",
        "mode": "nftables", "clusterCIDR": POD_CIDR, "hostnameOverride": NODE, "bindAddress": "0.0.0.0",
        "clientConnection": {"kubeconfig": str(conf / "kube-proxy.kubeconfig")},
        # its defaults set limits of the whole machine
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    })  # fmt: skip
    _write_json(conf / "cni" / "10-bridge.conflist", {
        "cniVersion": "1.0.0", "name": "weightsync",
        "plugins": [
            {
                "type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True,
                "ipam": {"type": "host-local", "dataDir": str(data / "cni"), "ranges": [[{"subnet": POD_CIDR}]], "routes": [{"dst": "0.0.0.0/0"}]},
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    })  # fmt: skip
    (conf / "containerd.toml").write_text(_CONTAINERD.format(data=data, socket=places.containerd_socket, bin=places.bin, conf=conf))


def commands(places: Places) -> dict[str, list[str]]:
    """Part -> command line."""
    pki, conf, data = places.pki, places.conf, places.data

    def line(name: str, options: Mapping[str, object]) -> list[str]:
        return [str(places.bin / name), *(f"--{key}={value}" for key, value in options.items())]

    return {
        "etcd": line("etcd", {
            "data-dir": data / "etcd", "name": "only", "listen-client-urls": "http://127.0.0.1:2379",
            "advertise-client-urls": "http://127.0.0.1:2379", "listen-peer-urls": "http://127.0.0.1:2380",
            "initial-advertise-peer-urls": "http://127.0.0.1:2380", "initial-cluster": "only=http://127.0.0.1:2380",
            "unsafe-no-fsync": "true", "log-level": "warn",
        }),
        "kube-apiserver": line("kube-apiserver", {
            "etcd-servers": "http://127.0.0.1:2379", "secure-port": 6443, "bind-address": "0.0.0.0", "advertise-address": NODE_IP,
            "service-cluster-ip-range": SERVICE_CIDR, "client-ca-file": pki / "ca.crt", "tls-cert-file": pki / "apiserver.crt",
            "tls-private-key-file": pki / "apiserver.key", "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-key-file": pki / "service-accounts.pub", "service-account-signing-key-file": pki / "service-accounts.key",
            "authorization-mode": "Node,RBAC", "enable-admission-plugins": "NodeRestriction,OwnerReferencesPermissionEnforcement",
            "kubelet-client-certificate": pki / "kubelet-client.crt", "kubelet-client-key": pki / "kubelet-client.key",
            "kubelet-certificate-authority": pki / "ca.crt", "kubelet-preferred-address-types": "InternalIP", "allow-privileged": "true",
            "requestheader-client-ca-file": pki / "ca.crt", "requestheader-allowed-names": "front-proxy-client",
            "requestheader-username-headers": "X-Remote-User", "requestheader-group-headers": "X-Remote-Group",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-", "proxy-client-cert-file": pki / "front-proxy.crt",
            "proxy-client-key-file": pki / "front-proxy.key", "profiling": "false",
        }),
        "kube-controller-manager": line("kube-controller-manager", {
            **_client(conf, "kube-controller-manager"), "root-ca-file": pki / "ca.crt",
            "service-account-private-key-file": pki / "service-accounts.key", "cluster-signing-cert-file": pki / "ca.crt",
            "cluster-signing-key-file": pki / "ca.key", "use-service-account-credentials": "true", "cluster-cidr": POD_CIDR,
            "allocate-node-cidrs": "true", "service-cluster-ip-range": SERVICE_CIDR, "node-monitor-grace-period": "20s",
            "flex-volume-plugin-dir": data / "volume-plugins",
        }),
        "kube-scheduler": line("kube-scheduler", _client(conf, "kube-scheduler")),
        "containerd": line("containerd", {"config": conf / "containerd.toml", "log-level": "info"}),
        "kubelet": line("kubelet", {
            "config": conf / "kubelet.json", "kubeconfig": conf / "kubelet.kubeconfig", "root-dir": data / "kubelet",
            "hostname-override": NODE, "node-ip": NODE_IP, "cert-dir": pki,
        }),
        "kube-proxy": line("kube-proxy", {"config": conf / "kube-proxy.json"}),
    }  # fmt: skip


def _client(conf: Path, name: str) -> dict[str, object]:
    kubeconfig = conf / f"{name}.kubeconfig"
    return {
        "kubeconfig": kubeconfig, "authentication-kubeconfig": kubeconfig, "authorization-kubeconfig": kubeconfig,
        "leader-elect": "false", "bind-address": "127.0.0.1", "profiling": "false",
    }  # fmt: skip


def _kubelet(places: Places) -> dict[str, Any]:
    pki = places.pki
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "failCgroupV1": False, "cgroupDriver": "cgroupfs", "containerRuntimeEndpoint": f"unix://{places.containerd_socket}",
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}, "x509": {"clientCAFile": str(pki / "ca.crt")}},
        "authorization": {"mode": "Webhook"}, "tlsCertFile": str(pki / "kubelet.crt"), "tlsPrivateKeyFile": str(pki / "kubelet.key"),
        "oomScoreAdj": 0, "podLogsDir": "/var/log/pods", "volumePluginDir": str(places.data / "volume-plugins"), "address": "0.0.0.0",
        "readOnlyPort": 0, "healthzBindAddress": "127.0.0.1", "clusterDomain": "cluster.local", "resolvConf": str(places.conf / "resolv.conf"),
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99, "syncFrequency": _KUBELET_SYNC, "maxPods": 60,
        "nodeStatusUpdateFrequency": "5s", "nodeLeaseDurationSeconds": 20, "registerNode": True, "failSwapOn": False,
    }  # fmt: skip


def _write_kubeconfig(places: Places, path: Path, user: str, server: str) -> None:
    _write_json(path, {
        "apiVersion": "v1", "kind": "Config", "current-context": "weightsync",
        "clusters": [{"name": "weightsync", "cluster": {"server": server, "certificate-authority": str(places.pki / "ca.crt")}}],
        "users": [{"name": user, "user": {"client-certificate": str(places.pki / f"{user}.crt"), "client-key": str(places.pki / f"{user}.key")}}],
        "contexts": [{"name": "weightsync", "context": {"cluster": "weightsync", "user": user}}],
    })  # fmt: skip
    path.chmod(0o600)


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1))


_CONTAINERD = """version = 3
root = "{data}/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "{socket}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "local.test/pause:1"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{bin}"]
    conf_dir = "{conf}/cni"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "{bin}/runc"
        SystemdCgroup = false
[plugins.'io.containerd.nri.v1.nri']
  disable = true
"""
