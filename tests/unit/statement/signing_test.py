"""Signatures: what was signed is found again, and anything else is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from tests.support.training import tiny
from vestige.errors import ConfigError
from vestige.statement.signing import SIGNATURE_FILE, sign, verify
from vestige.train.training import train

pytestmark = pytest.mark.usefixtures("empty_folder")
RUN = Path("run")


def keys(name: str, ssh: bool = False, password: bytes | None = None) -> tuple[Path, Path]:
    """A private key and its public half in files."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = forms.PrivateFormat.OpenSSH if ssh else forms.PrivateFormat.PKCS8
    lock = forms.BestAvailableEncryption(password) if password else forms.NoEncryption()
    Path(f"{name}.key").write_bytes(key.private_bytes(forms.Encoding.PEM, private, lock))
    encoding, form = (
        (forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
        if ssh
        else (forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    )
    Path(f"{name}.pub").write_bytes(key.public_key().public_bytes(encoding, form))
    return Path(f"{name}.key"), Path(f"{name}.pub")


@pytest.mark.parametrize("what", ["epsilon", "noise_multiplier", "count"])
def test_a_claim_below_its_own_charges_is_not_signed(what: str) -> None:
    train(tiny(out=RUN))
    private, _ = keys("mine")
    path = RUN / "statement.json"
    changed = json.loads(path.read_text())
    place = changed["guarantee"] if what == "epsilon" else changed["ledger"]["events"][0]
    place[what] = place[what] * 2 if what == "count" else place[what] * 0.9
    path.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="and the charges that it lists come to"):
        sign(RUN, private)
    assert not (RUN / SIGNATURE_FILE).exists()


@pytest.mark.parametrize("ssh", [False, True], ids=["pem", "ssh"])
def test_a_signature_fits_its_statement_and_its_key_alone(ssh: bool) -> None:
    train(tiny(out=RUN))
    private, public = keys("mine", ssh)
    assert sign(RUN, private) == RUN / SIGNATURE_FILE
    verify(RUN, public)
    _, other = keys("other", ssh)
    with pytest.raises(ConfigError, match="does not fit"):
        verify(RUN, other)
    path = RUN / "statement.json"
    whole = path.read_bytes()
    changed = json.loads(whole)
    changed["run"]["seed"] = 1
    for content in (whole + b"\n", json.dumps(changed).encode()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="does not fit"):
            verify(RUN, public)
    path.write_bytes(whole)
    verify(RUN, public)
    (RUN / "model.pt").write_bytes(b"other weights")
    for refused in (lambda: verify(RUN, public), lambda: sign(RUN, private)):
        with pytest.raises(ConfigError, match="is not the model of the statement"):
            refused()


def test_what_has_no_guarantee_is_not_signed() -> None:
    train(tiny(out=RUN, noise_seed=3))
    private, _ = keys("mine")
    with pytest.raises(ConfigError, match="not for signature: its status is 'test mode'"):
        sign(RUN, private)
    assert not (RUN / SIGNATURE_FILE).exists()


def test_other_keys_and_no_keys_are_refused() -> None:
    train(tiny(out=RUN))
    private, public = keys("mine")
    with pytest.raises(ConfigError, match=r"has no statement\.json\.sig"):
        verify(RUN, public)
    sign(RUN, private)
    curve = ec.generate_private_key(ec.SECP256R1())
    pem = forms.Encoding.PEM
    Path("ec.key").write_bytes(
        curve.private_bytes(pem, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    )
    locked, _ = keys("locked", password=os.urandom(8).hex().encode())
    Path("none.key").write_text("nothing")
    for path, message in (
        ("ec.key", "not of the kind Ed25519"),
        (str(locked), "has a passphrase"),
        ("none.key", "is no private key"),
        ("absent.key", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            sign(RUN, Path(path))
    with pytest.raises(ConfigError, match="is no public key"):
        verify(RUN, Path("none.key"))
