"""Certificates and keys of a SuperLink on 127.0.0.1 and its nodes, for one test."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


def _name(said: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, said)])


def _signed(subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, by: ec.EllipticCurvePrivateKey) -> bytes:
    now, root = datetime.datetime.now(datetime.UTC), subject == issuer
    made = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.BasicConstraints(ca=root, path_length=None), critical=True)
    )
    there = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = made.add_extension(x509.SubjectAlternativeName(there), critical=False)
    return made.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM)


def write_certificates(folder: Path) -> None:
    """Write ca.crt, server.crt and server.key into a folder, and the self-signed local.crt and local.key."""
    root, server, local = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    (folder / "ca.crt").write_bytes(_signed("tests", root, "tests", root))
    (folder / "server.crt").write_bytes(_signed("127.0.0.1", server, "tests", root))
    (folder / "local.crt").write_bytes(_signed("node", local, "node", local))
    for name, key in {"server": server, "local": local}.items():
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / f"{name}.key").write_bytes(private)


def write_key(folder: Path, name: str) -> None:
    """Write a node's private key as `name`, and its public key as `name`.pub, as `ssh-keygen` does."""
    key = ec.generate_private_key(ec.SECP384R1())
    path = folder / name
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (folder / f"{name}.pub").write_bytes(public + b"\n")
