"""Writes the few container images that a cluster without a registry needs, as OCI archives for ``ctr images import``.

``local.test/pause:1`` holds a pod's namespaces, ``local.test/busybox:1`` is a shell, and ``local.test/host:1`` is an empty
root whose ``/usr`` comes from the machine by hostPath, so that the machine's own Python and virtual environment run in pods.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAUSE, BUSYBOX, HOST = "local.test/pause:1", "local.test/busybox:1", "local.test/host:1"

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Entry:
    """One file, folder (``content`` None) or link (``link`` set) of an image."""

    path: str
    content: bytes | None = None
    link: str = ""
    mode: int = 0o755

    def add_to(self, archive: tarfile.TarFile) -> None:
        """Write it, with no time or owner, so that equal input gives equal images."""
        info = tarfile.TarInfo(self.path)
        info.mode = self.mode
        if self.link:
            info.type, info.linkname = tarfile.SYMTYPE, self.link
        elif self.content is None:
            info.type = tarfile.DIRTYPE
        else:
            info.size = len(self.content)
        archive.addfile(info, io.BytesIO(self.content) if self.content is not None else None)


_ROOT = (
    *(Entry(folder) for folder in ("etc", "root", "proc", "sys", "dev", "run", "var", "opt", "usr")),
    Entry("tmp", mode=0o1777),
    Entry("var/run", link="../run"),
    Entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n", mode=0o644),
    Entry("etc/group", b"root:x:0:\nnogroup:x:65534:\n", mode=0o644),
    Entry("etc/nsswitch.conf", b"hosts: files dns\n", mode=0o644),
)


def write_images(folder: Path, pause: Path) -> None:
    """Write the three archives unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"pause": PAUSE, "busybox": BUSYBOX, "host": HOST}
    if all((folder / f"{name}.tar").exists() for name in wanted):
        return
    shell = Path(shutil.which("busybox") or "/bin/busybox")
    applets = subprocess.run([str(shell), "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = [Entry(f"bin/{name}", link="busybox") for name in applets if name != "busybox"]
    write_image(folder / "pause.tar", PAUSE, [Entry("pause", pause.read_bytes())], {"Entrypoint": ["/pause"], "User": "65535:65535"})
    write_image(folder / "busybox.tar", BUSYBOX, [*_ROOT, Entry("bin"), Entry("bin/busybox", shell.read_bytes()), *links], {"Cmd": ["sh"]})
    merged = [Entry(name, link=f"usr/{name}") for name in ("bin", "sbin", "lib", "lib64")]
    write_image(folder / "host.tar", HOST, [*_ROOT, *merged], {"Cmd": ["/bin/sh"]})


def write_image(path: Path, name: str, entries: Sequence[Entry], config: dict[str, Any]) -> None:
    """Write an image of one layer (OCI image layout 1.0.0, Linux on x86-64)."""
    blobs: dict[str, bytes] = {}

    def add(content: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": f"sha256:{digest}", "size": len(content)}

    platform = {"architecture": "amd64", "os": "linux"}
    layer = add(_tar(entries), "layer.v1.tar")
    described: dict[str, Any] = {
        **platform,
        "config": {"Env": [_PATH], **config},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        "history": [{"created_by": "weightsync_devkit"}],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add(json.dumps(described).encode(), "config.v1+json"),
        "layers": [layer],
    }
    listed = {
        **add(json.dumps(manifest).encode(), "manifest.v1+json"),
        "platform": platform,
        "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rsplit(":", 1)[1]},
    }
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [listed]}
    files = [
        Entry("oci-layout", b'{"imageLayoutVersion":"1.0.0"}', mode=0o644),
        Entry("index.json", json.dumps(index).encode(), mode=0o644),
    ]
    files += [Entry(f"blobs/sha256/{digest}", content, mode=0o644) for digest, content in blobs.items()]
    path.write_bytes(_tar(files))


def _tar(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            entry.add_to(archive)
    return buffer.getvalue()
