"""Builds a cluster's programs from source with Go, each part from its own pinned module in ``go/``.

A program is built again when its module or this description changed; with warm Go caches that takes seconds, from
empty ones a quarter of an hour on two cores (most of it Kubernetes).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightsync_devkit.cluster.images import write_images
from weightsync_devkit.cluster.places import Places

DEBIAN_PACKAGES = ("libseccomp-dev", "busybox-static", "nftables", "iptables", "conntrack", "iproute2", "gcc", "libc6-dev")
"""What building and running needs beside Go (Debian 12 names)."""

_HERE = Path(__file__).parent
_KUBERNETES_VERSION = "1.36.3"
_CNI = "github.com/containernetworking/plugins/plugins"
_CONTAINERD = "github.com/containerd/containerd/v2"


class BuildError(RuntimeError):
    """A program could not be built; the message holds the end of the compiler's words."""


@dataclass(frozen=True)
class Part:
    """One Go module of ``go/`` and what is built from it."""

    module: str
    programs: Mapping[str, str]
    """Program -> Go package."""
    cgo: bool = False
    tags: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Go variables set by the linker, e.g. versions that programs report."""

    @property
    def stamp(self) -> str:
        """Changes when the result could."""
        text = repr((dict(self.programs), self.cgo, self.tags, dict(self.variables)))
        return hashlib.sha256(text.encode() + (_HERE / "go" / self.module / "go.sum").read_bytes()).hexdigest()


PARTS = (
    Part(
        "kubernetes",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
        },
        variables={
            "k8s.io/component-base/version.gitVersion": f"v{_KUBERNETES_VERSION}",
            "k8s.io/component-base/version.gitMajor": _KUBERNETES_VERSION.split(".")[0],
            "k8s.io/component-base/version.gitMinor": _KUBERNETES_VERSION.split(".")[1],
        },
    ),
    Part("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    # With seccomp: the kubelet gives every sandbox a profile.
    Part("runc", {"runc": "github.com/opencontainers/runc"}, cgo=True, tags="seccomp", variables={"main.version": "1.5.3"}),
    Part(
        "containerd",
        {name: f"{_CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
        tags="no_btrfs no_devmapper no_zfs",
        variables={f"{_CONTAINERD}/version.Version": "v2.4.2"},
    ),
    Part(
        "cni",
        {
            "bridge": f"{_CNI}/main/bridge",
            "host-local": f"{_CNI}/ipam/host-local",
            "loopback": f"{_CNI}/main/loopback",
            "portmap": f"{_CNI}/meta/portmap",
        },
    ),
    Part("helm", {"helm": "helm.sh/helm/v4/cmd/helm"}),
)


def missing() -> str:
    """What this machine lacks to build and run a cluster, in words; empty if nothing."""
    lacks = [] if os.geteuid() == 0 else ["root's rights"]
    lacks += [] if shutil.which("go") else ["Go 1.26 or newer (https://go.dev/dl)"]
    programs = {
        "gcc": "gcc",
        "busybox": "busybox-static",
        "nft": "nftables",
        "iptables": "iptables",
        "conntrack": "conntrack",
        "ip": "iproute2",
    }
    packages = [package for program, package in programs.items() if shutil.which(program) is None]
    if not Path("/usr/include/seccomp.h").exists():
        packages.append("libseccomp-dev")
    lacks += [f"the Debian packages {' '.join(packages)}"] if packages else []
    return f"a cluster needs {', and '.join(lacks)}" if lacks else ""


def build(places: Places, say: Callable[[str], None] = lambda _line: None) -> None:
    """Build every program and image that is missing or out of date.

    Raises:
        BuildError: a tool is missing, or the compiler failed.
    """
    if lacks := missing():
        raise BuildError(f"{lacks}; install what is missing and run it again")
    places.bin.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if _is_current(part, places):
            continue
        say(f"building {part.module} ({', '.join(part.programs)}) ...")
        for name, package in part.programs.items():
            _go_build(part, package, places.bin / name)
        (places.bin / f".{part.module}").write_text(part.stamp)
    pause = places.bin / "pause"
    if not pause.exists():
        _checked(["gcc", "-static", "-Os", "-s", "-o", str(pause), str(_HERE / "pause.c")], "the pause container")
    write_images(places.images, pause)


def is_built(places: Places) -> bool:
    """Whether every program and image is there and up to date."""
    return all(_is_current(part, places) for part in PARTS) and places.images.exists()


def _is_current(part: Part, places: Places) -> bool:
    stamp = places.bin / f".{part.module}"
    return stamp.exists() and stamp.read_text() == part.stamp and all((places.bin / name).exists() for name in part.programs)


def _go_build(part: Part, package: str, program: Path) -> None:
    linker = " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in part.variables.items())])
    command = ["go", "build", "-C", str(_HERE / "go" / part.module), "-trimpath", "-tags", part.tags, "-ldflags", linker]
    _checked([*command, "-o", str(program), package], package, CGO_ENABLED="1" if part.cgo else "0")


def _checked(command: list[str], what: str, **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise BuildError(f"{what} was not built ({command[0]} ended with {done.returncode}):\n{done.stderr[-3000:]}")
