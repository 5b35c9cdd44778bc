"""A detached signature of a statement, with a key of the signer's own.

Guarantee: `verify` returns only if `statement.json` is, byte for byte, what the holder of the key
has signed, and `model.pt`, where it is there, has the hash that the statement names. Whose key it
is has to be known from elsewhere. Before it is signed, epsilon is computed again from the charges
that the statement lists. That these are the charges of the run, the signature alone answers for.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.privacy import accounting
from vestige.privacy.events import Event
from vestige.statement.model import JSON_FILE, read

SIGNATURE_FILE, WEIGHTS_FILE = f"{JSON_FILE}.sig", "model.pt"
_MAKE = "make one with `openssl genpkey -algorithm ed25519 -out key.pem` or `ssh-keygen -t ed25519`"


def sign(folder: Path, key: Path) -> Path:
    """Sign the statement of a run folder with a private Ed25519 key; the file of the signature."""
    found = read(folder)
    if found["status"] != "private":
        raise ConfigError(
            f"the statement of {str(folder)!r} is not for signature: its status is "
            f"{found['status']!r}, and there is no guarantee to sign."
        )
    _check_epsilon(folder, found)
    _check_weights(folder, found["run"].get("weights_sha256"))
    signature = _private(key).sign((folder / JSON_FILE).read_bytes())
    path = folder / SIGNATURE_FILE
    write_whole(path, f"{base64.b64encode(signature).decode()}\n")
    return path


def verify(folder: Path, key: Path) -> None:
    """Check the signature of a run folder's statement against a public key, and the weights.

    ConfigError where something does not fit.
    """
    found = read(folder)
    try:
        signature = base64.b64decode((folder / SIGNATURE_FILE).read_bytes(), validate=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(folder)!r} has no {SIGNATURE_FILE} that can be read: sign it with `vestige "
            "statement RUN --sign KEY`."
        ) from error
    try:
        _public(key).verify(signature, (folder / JSON_FILE).read_bytes())
    except InvalidSignature:
        raise ConfigError(
            f"the signature in {str(folder)!r} does not fit: the statement was changed, or another "
            "key has signed it."
        ) from None
    _check_weights(folder, found["run"].get("weights_sha256"))


def _check_epsilon(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse a claim below what its own charges come to, by every accountant that bounds them."""
    claim, charges = found["guarantee"], found["ledger"]
    listed = (row for name in ("earlier", "events", "unmade") for row in charges[name])
    events = [Event.from_json(row) for row in listed]
    known = {claim["accountant"], "rdp"}  # a budget that is guarded by Renyi DP claims its limit
    least = min(accounting.epsilon(events, claim["delta"], name) for name in known)
    if least > claim["epsilon"] * (1 + 1e-9):
        raise ConfigError(
            f"the statement of {str(folder)!r} claims epsilon {claim['epsilon']:.6g}, and the "
            f"charges that it lists come to {least:.6g}: it was changed. Make it anew from the run."
        )


def _check_weights(folder: Path, stated: str | None) -> None:
    path = folder / WEIGHTS_FILE
    if path.is_file() and stated and hashlib.sha256(path.read_bytes()).hexdigest() != stated:
        raise ConfigError(
            f"{path} is not the model of the statement: its SHA-256 is another. Restore it."
        )


def _private(path: Path) -> Ed25519PrivateKey:
    text = _bytes(path)
    load = (
        serialization.load_ssh_private_key
        if b"OPENSSH" in text
        else serialization.load_pem_private_key
    )
    try:
        key = load(text, password=None)
    except TypeError:
        raise ConfigError(
            f"the key {str(path)!r} has a passphrase: give one without, or sign {JSON_FILE} with a "
            "tool that asks for it."
        ) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{str(path)!r} is no private key: {_MAKE}.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the key {str(path)!r} is not of the kind Ed25519: {_MAKE}.")
    return key


def _public(path: Path) -> Ed25519PublicKey:
    text = _bytes(path)
    load = (
        serialization.load_ssh_public_key
        if text.startswith(b"ssh-")
        else serialization.load_pem_public_key
    )
    try:
        key = load(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{str(path)!r} is no public key: give the .pub file of ssh-keygen, or what `openssl "
            "pkey -in key.pem -pubout` writes."
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"the key {str(path)!r} is not of the kind Ed25519: {_MAKE}.")
    return key


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the key {str(path)!r} cannot be read ({error.strerror}).") from error
