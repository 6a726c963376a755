"""Keys in PEM files and the CURVE keys that ZeroMQ gets from them."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
import zmq
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from zmq.utils import z85

from kvrelay.wire.errors import KeysError
from kvrelay.wire.messages import Role
from kvrelay.wire.security.keys import WireKeys, make_keys


def certificate_of(key: Ed25519PrivateKey) -> bytes:
    name = x509.Name([])
    day = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), day, day)
    return builder.sign(key, None).public_bytes(Encoding.PEM)


def private_key(path: Path) -> Ed25519PrivateKey:
    key = load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    return key


@pytest.mark.parametrize("role", list(Role))
def test_each_role_has_its_own_pair_and_knows_all_others(tmp_path: Path, role: Role) -> None:
    make_keys(tmp_path)
    keys = WireKeys.load(tmp_path, role)
    assert keys.role_of(keys.public) is role
    assert zmq.curve_public(keys.secret) == keys.public
    assert len({keys.peers[each] for each in Role}) == 3
    assert keys.role_of(b"0" * 40) is None


def test_both_halves_come_out_of_ed25519_as_a_pair(tmp_path: Path) -> None:
    """The public key is mapped between the curves, and the private one hashed. X25519 must give both sides the same secret."""
    make_keys(tmp_path)
    gateway, decode = (WireKeys.load(tmp_path, role) for role in (Role.GATEWAY, Role.DECODE))

    def agreed(secret: bytes, public: bytes) -> bytes:
        private = X25519PrivateKey.from_private_bytes(z85.decode(secret))
        return private.exchange(X25519PublicKey.from_public_bytes(z85.decode(public)))

    assert agreed(gateway.secret, decode.public) == agreed(decode.secret, gateway.public)


def test_private_keys_are_their_owners_and_in_no_log(tmp_path: Path) -> None:
    for path in make_keys(tmp_path):
        if path.suffix == ".key":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = WireKeys.load(tmp_path, Role.PREFILL)
    assert keys.secret.decode() not in repr(keys)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_keys(tmp_path)
    before = (tmp_path / "decode.key").read_bytes()
    with pytest.raises(KeysError, match="would be overwritten"):
        make_keys(tmp_path)
    assert (tmp_path / "decode.key").read_bytes() == before


def test_a_process_needs_only_its_own_private_key(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "gateway.key").unlink()
    (tmp_path / "decode.key").unlink()
    assert WireKeys.load(tmp_path, Role.PREFILL).role_of(WireKeys.load(tmp_path, Role.PREFILL).public) is Role.PREFILL
    with pytest.raises(KeysError, match=r"cannot read the key .*decode\.key"):
        WireKeys.load(tmp_path, Role.DECODE)


def test_certificates_and_several_keys_in_one_file(tmp_path: Path) -> None:
    """A file may hold a certificate, as from Helm or cert-manager, and a second public key. Both keys are loaded."""
    make_keys(tmp_path)
    old, new = private_key(tmp_path / "gateway.key"), Ed25519PrivateKey.generate()
    public = new.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    before = WireKeys.load(tmp_path, Role.DECODE).peers[Role.GATEWAY]
    (tmp_path / "gateway.pem").write_bytes(b"the old one\n" + certificate_of(old) + public)
    after = WireKeys.load(tmp_path, Role.DECODE).peers[Role.GATEWAY]
    assert len(after) == 2
    assert after[0] == before[0]


BROKEN = {
    "no such file": (None, "cannot read the key"),
    "not PEM": (b"hello", "holds no public key"),
    "a broken block": (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "no public key or certificate"),
    "another kind of key": (
        X25519PrivateKey.generate().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "must be Ed25519",
    ),
    "somebody else's key": (
        Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "belongs to no key in",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, case: str) -> None:
    make_keys(tmp_path)
    content, text = BROKEN[case]
    path = tmp_path / "decode.pem"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeysError, match=text):
        WireKeys.load(tmp_path, Role.DECODE)


def test_a_private_key_that_is_none(tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / "decode.key").write_bytes(b"secret")
    with pytest.raises(KeysError, match="holds no private key"):
        WireKeys.load(tmp_path, Role.DECODE)


def test_processes_of_one_role_have_a_secret_in_common_for_each_purpose(tmp_path: Path) -> None:
    make_keys(tmp_path)
    decode, again, prefill = (WireKeys.load(tmp_path, role) for role in (Role.DECODE, Role.DECODE, Role.PREFILL))
    assert decode.derived("ranks") == again.derived("ranks")
    secrets = {decode.derived("ranks"), decode.derived("other"), prefill.derived("ranks"), decode.secret}
    assert len(secrets) == 4
    assert len(decode.derived("ranks")) == 32
