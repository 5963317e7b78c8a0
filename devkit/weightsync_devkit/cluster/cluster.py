"""Starts, stops and reaches one cluster from outside its namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from weightsync_devkit.cluster.certificates import write_certificates
from weightsync_devkit.cluster.configs import write_configs
from weightsync_devkit.cluster.places import CGROUPS, CONTROL_PLANE, NODE, NODE_PARTS, Places, default_places

START_SECONDS = 180.0
_CGROUP = "weightsync-cluster"


class ClusterError(RuntimeError):
    """The cluster did not do what was asked; the message names the log to read."""


class Cluster:
    """A handle on the cluster of one folder, running or not.

    ``up`` and ``down`` may be called from different processes: everything lies in ``places``. Needs root.
    """

    def __init__(self, places: Places | None = None) -> None:
        self.places = places or default_places()

    # -- life

    def up(self, *, control_plane_only: bool = False) -> None:
        """Start it unless it runs; return when the API server, and the node if wanted, are ready.

        Raises:
            ClusterError: something ended or took longer than ``START_SECONDS``.
        """
        if self.is_up():
            if not control_plane_only and not self._node_runs():
                raise ClusterError("the cluster runs without a node; take it down first")
            return
        self.down()
        self.places.logs.mkdir(parents=True)
        write_certificates(self.places.pki)
        write_configs(self.places)
        until = time.monotonic() + START_SECONDS
        self._start_namespaces(until)
        runtime, *node = NODE_PARTS
        for name in CONTROL_PLANE[:2] if control_plane_only else (*CONTROL_PLANE[:2], runtime):
            self.start(name)
        self._start_forwarder()
        self._wait("the API server", lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", until)
        for name in CONTROL_PLANE[2:]:
            self.start(name)
        self._wait("the default service account", lambda: bool(self.kubectl("get", "sa", "default", "-o", "name", check=False)), until)
        if control_plane_only:
            return
        self._wait("containerd", lambda: self._ctr("version").returncode == 0, until)
        for archive in sorted(self.places.images.glob("*.tar")):
            self.import_image(archive)
        for name in node:  # the kubelet ends where it finds no runtime
            self.start(name)
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        self._wait("the node", lambda: self.kubectl("get", "node", NODE, "-o", ready, check=False) == "True", until)

    def down(self) -> None:
        """End everything and remove what it wrote; nothing happens if nothing runs."""
        running = self._recorded()
        for process in running.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(running.values(), timeout=20)
        if left:
            raise ClusterError(f"processes did not end: {left}")
        with contextlib.suppress(FileNotFoundError):
            for folder in json.loads((self.places.data / "cgroups.json").read_text()):
                _remove_cgroup(Path(folder))
        shutil.rmtree(self.places.data, ignore_errors=True)
        if self.places.data.exists():
            raise ClusterError(f"{self.places.data} could not be removed")

    def is_up(self) -> bool:
        """Whether its namespaces live."""
        return "node" in self._recorded()

    # -- parts, for fault tests

    def start(self, part: str) -> None:
        """Start one part (names in ``places.CONTROL_PLANE`` and ``places.NODE_PARTS``)."""
        self._order(f"start {part}")

    def stop(self, part: str) -> None:
        """End one part as its service manager would."""
        self._order(f"stop {part}")

    def kill(self, part: str) -> None:
        """Kill one part."""
        self._order(f"kill {part}")

    # -- reaching in

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """Run kubectl as administrator; returns what it printed ("" for a failure with ``check=False``)."""
        done = subprocess.run(
            [str(self.places.bin / "kubectl"), "--kubeconfig", str(self.places.kubeconfig), *arguments],
            capture_output=True, text=True, input=stdin, env={**os.environ, "KUBECACHEDIR": str(self.places.data / "kubecache")},
        )  # fmt: skip
        if done.returncode and check:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return "" if done.returncode else done.stdout.strip()

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside the namespaces, where pod addresses are reachable."""
        done = subprocess.run([*self.enter(), *command], capture_output=True, text=True)
        if done.returncode and check:
            raise ClusterError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        return done

    def enter(self) -> list[str]:
        """The command prefix that runs what follows inside the namespaces."""
        return ["nsenter", "-t", str(self._node_process().pid), "-m", "-C", "-n", "-p", "-u", "-i"]

    def import_image(self, archive: Path) -> None:
        """Give the node an OCI image archive."""
        done = self._ctr("-n", "k8s.io", "images", "import", "--local", str(archive))
        if done.returncode:
            raise ClusterError(f"{archive} was not imported: {done.stderr[-1000:]}")

    # -- inside

    def _start_namespaces(self, until: float) -> None:
        cgroups = _own_cgroups()
        (self.places.data / "cgroups.json").write_text(json.dumps([str(folder) for folder in cgroups]))
        kinds = ("mount", "cgroup", "pid", "net", "uts", "ipc")
        outer = self._spawn(
            ["unshare", *(f"--{kind}" for kind in kinds), "--fork", "--kill-child", *self._module("node")],
            "node", preexec_fn=lambda: _enter_cgroups(cgroups),
        )  # fmt: skip
        self._record("unshare", outer)
        self._wait("the namespaces", lambda: bool(outer.children()), until, needs_node=False)
        self._record("node", outer.children()[0])
        self._wait("the first process", self.places.control_socket.exists, until)

    def _start_forwarder(self) -> None:
        self._record("forwarder", self._spawn(self._module("forwarder", str(self._node_process().pid)), "forwarder"))

    def _module(self, name: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", f"weightsync_devkit.cluster.{name}", str(self.places.root), str(self.places.port), *arguments]

    def _spawn(self, command: Sequence[str], log: str, preexec_fn: Callable[[], None] | None = None) -> psutil.Process:
        with (self.places.logs / f"{log}.log").open("ab") as out:
            started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, preexec_fn=preexec_fn,
                cwd=self.places.data,
            )  # fmt: skip
        return psutil.Process(started.pid)

    def _record(self, name: str, process: psutil.Process) -> None:
        path = self.places.data / "processes.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, name: [process.pid, process.create_time()]}))

    def _recorded(self) -> dict[str, psutil.Process]:
        """The processes that this cluster's starter recorded and that still live."""
        try:
            recorded = json.loads((self.places.data / "processes.json").read_text())
        except FileNotFoundError:
            return {}
        alive = {}
        for name, (pid, created) in recorded.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if abs(process.create_time() - created) < 0.05 and process.status() != psutil.STATUS_ZOMBIE:
                    alive[name] = process
        return alive

    def _node_process(self) -> psutil.Process:
        try:
            return self._recorded()["node"]
        except KeyError:
            raise ClusterError(f"the cluster in {self.places.root} is not up") from None

    def _node_runs(self) -> bool:
        return "kubelet" in json.loads(self._order("status"))

    def _order(self, order: str) -> str:
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self.places.control_socket))
            control.sendall(order.encode())
            answer = control.recv(65536).decode()
        if answer.startswith("error"):
            raise ClusterError(f"{order}: {answer}; logs are in {self.places.logs}")
        return answer

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.places.bin / "ctr"), "-a", str(self.places.containerd_socket), *arguments, check=False)

    def _wait(self, what: str, done: Callable[[], bool], until: float, *, needs_node: bool = True) -> None:
        while not done():
            if needs_node and not self.is_up():
                raise ClusterError(f"the cluster ended while waiting for {what}; logs are in {self.places.logs}")
            if time.monotonic() > until:
                raise ClusterError(f"{what} was not ready in {START_SECONDS:.0f} s; logs are in {self.places.logs}")
            time.sleep(0.1)


def _own_cgroups() -> list[Path]:
    """The cluster's cgroup below this process's own, in each hierarchy."""
    mine = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        mine.update({name.replace("name=", ""): path for name in names.split(",")})
    return [Path(f"/sys/fs/cgroup/{name}{mine[name].rstrip('/')}/{_CGROUP}") for name in CGROUPS if name in mine]


def _enter_cgroups(folders: Sequence[Path]) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "cpuset.cpus").exists():
            for name in ("cpuset.cpus", "cpuset.mems"):
                (folder / name).write_text((folder.parent / name).read_text())
        (folder / "cgroup.procs").write_text(str(os.getpid()))


def _remove_cgroup(folder: Path) -> None:
    for top, _, _ in os.walk(folder, topdown=False):
        for _attempt in range(40):
            try:
                os.rmdir(top)
            except FileNotFoundError:
                break
            except OSError:  # its last process is still being collected
                time.sleep(0.05)
            else:
                break
