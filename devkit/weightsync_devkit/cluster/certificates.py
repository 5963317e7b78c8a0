"""The cluster's own certificate authority, and a certificate for each part."""

from __future__ import annotations

from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from weightsync_devkit.cluster.places import API_SERVICE_IP, NODE, NODE_IP

_API_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost")

_CLIENTS = {
    "admin": ("system:masters", "admin"),
    "kubelet-client": ("system:masters", "kube-apiserver-kubelet-client"),
    "kube-controller-manager": (None, "system:kube-controller-manager"),
    "kube-scheduler": (None, "system:kube-scheduler"),
    "kube-proxy": (None, "system:kube-proxy"),
    "front-proxy": (None, "front-proxy-client"),
}
"""Certificate -> (group, user) as Kubernetes' own RBAC roles know them."""


def write_certificates(folder: Path) -> None:
    """Write ``ca``, ``apiserver``, ``kubelet``, the clients' and the service accounts' signing key."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA(organization_name="weightsync-test-cluster", key_type=trustme.KeyType.ECDSA)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    authority.private_key_pem.write_to_path(str(folder / "ca.key"))

    def issue(name: str, *hosts: str, user: str, group: str | None = None) -> None:
        made = authority.issue_cert(*hosts, common_name=user, organization_name=group, key_type=trustme.KeyType.ECDSA)
        made.cert_chain_pems[0].write_to_path(str(folder / f"{name}.crt"))
        made.private_key_pem.write_to_path(str(folder / f"{name}.key"))

    issue("apiserver", *_API_NAMES, "127.0.0.1", NODE_IP, API_SERVICE_IP, user="kube-apiserver")
    issue("kubelet", NODE, NODE_IP, "127.0.0.1", user=f"system:node:{NODE}", group="system:nodes")
    for name, (group, user) in _CLIENTS.items():
        issue(name, f"{name}.test", user=user, group=group)
    issue("service-accounts", "service-accounts.test", user="service-accounts")
    key = load_pem_private_key((folder / "service-accounts.key").read_bytes(), password=None)
    (folder / "service-accounts.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    for private in folder.glob("*.key"):
        private.chmod(0o600)
