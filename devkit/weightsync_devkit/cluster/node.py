"""The first process of the cluster's namespaces: own mounts, own network, and the parts of Kubernetes as its children.

``python -m weightsync_devkit.cluster.node ROOT PORT`` is run by :class:`weightsync_devkit.cluster.Cluster` inside fresh mount,
cgroup, network, UTS, IPC and PID namespaces. It takes one order per connection on a Unix socket: ``start NAME``,
``stop NAME`` (SIGTERM, then SIGKILL), ``kill NAME`` (SIGKILL), ``status``. When it ends, the kernel ends all its children.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from weightsync_devkit.cluster.configs import commands
from weightsync_devkit.cluster.places import CGROUPS, NODE, NODE_IP, Places

_OWN_SETTINGS = {
    "vm/overcommit_memory": 1, "vm/panic_on_oom": 0, "kernel/panic": 10, "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000, "kernel/keys/root_maxbytes": 25_000_000,
}  # fmt: skip
"""What the kubelet insists on setting for the whole machine; it gets files of its own instead."""

_STOP_SECONDS, _KILL_AFTER_SECONDS = 10.0, 5.0


def own_mounts(places: Places) -> None:
    """Give this mount namespace its own /proc, /sys, cgroups, /run and a /var whose changes stay in ``places.data``."""

    def mount(*arguments: str) -> None:
        subprocess.run(["mount", *arguments], check=True)

    mount("--make-rprivate", "/")
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys/fs/cgroup")
    for name in CGROUPS:
        Path("/sys/fs/cgroup", name).mkdir()
        mount("-t", "cgroup", "-o", "none,name=systemd" if name == "systemd" else name, "cgroup", f"/sys/fs/cgroup/{name}")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    Path("/run/lock").mkdir()
    upper, work = places.data / "var" / "upper", places.data / "var" / "work"
    for folder in (upper, work):
        folder.mkdir(parents=True, exist_ok=True)
    mount("-t", "overlay", "overlay", "-o", f"lowerdir=/var,upperdir={upper},workdir={work}", "/var")
    for setting, value in _OWN_SETTINGS.items():
        stand_in = Path("/run", "sysctl." + setting.replace("/", "."))
        stand_in.write_text(f"{value}\n")
        mount("--bind", str(stand_in), f"/proc/sys/{setting}")
    mount("--make-rshared", "/")


def own_network() -> None:
    """Bring up loopback and the node's address; there is no way out of here."""
    for command in (
        "link set lo up",
        "link add node0 type bridge",  # serves where the kernel has no dummy device
        f"addr add {NODE_IP}/24 dev node0",
        "link set node0 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    socket.sethostname(NODE)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")


class Parts:
    """The running parts of Kubernetes, and every orphan that their containers leave."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._commands = commands(places)
        self._pids: dict[str, int] = {}
        self._environment = {"PATH": f"{places.bin}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(places.data), "GOMAXPROCS": "2"}

    def start(self, name: str) -> str:
        """Start a part unless it runs."""
        if name not in self._commands:
            return f"error: {name} is none of {', '.join(self._commands)}"
        if name not in self._pids:
            with (self._places.logs / f"{name}.log").open("ab") as log:
                process = subprocess.Popen(
                    self._commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                    cwd=self._places.data, start_new_session=True,
                )  # fmt: skip
            self._pids[name] = process.pid
            process.returncode = 0  # collected below, not by Popen
        return "ok"

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> str:
        """End a part and wait until it is gone."""
        if name not in self._pids:
            return "ok"
        pid = self._pids[name]
        os.kill(pid, number)
        began = time.monotonic()
        while name in self._pids:
            waited = time.monotonic() - began
            if waited > _STOP_SECONDS:
                return f"error: {name} (pid {pid}) did not end in {_STOP_SECONDS} s"
            if waited > _KILL_AFTER_SECONDS:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        return "ok"

    def obey(self, order: str) -> str:
        """Carry out one order."""
        verb, _, name = order.partition(" ")
        match verb:
            case "start":
                return self.start(name)
            case "stop":
                return self.stop(name)
            case "kill":
                return self.stop(name, signal.SIGKILL)
            case "status":
                return json.dumps(self._pids)
        return f"error: unknown order {order!r}"

    def collect(self) -> None:
        """Collect ended children for ever."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                time.sleep(0.05)
                continue
            for name, known in list(self._pids.items()):
                if known == pid:
                    del self._pids[name]
                    print(f"{time.time():.2f} part={name} ended status={status}", flush=True)


def main() -> None:
    """Set up the namespaces, then obey."""
    places = Places(Path(sys.argv[1]), int(sys.argv[2]))
    own_mounts(places)
    own_network()
    parts = Parts(places)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(places.control_socket))
        listener.listen(8)
        threading.Thread(target=parts.collect, daemon=True).start()
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    answer = parts.obey(connection.recv(200).decode())
                except OSError as error:
                    answer = f"error: {error}"
                connection.sendall(answer.encode())


if __name__ == "__main__":
    main()
