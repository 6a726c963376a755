"""HTTPS: the handshake, certificates that change while clients are there, files that are wrong, clients that speak no TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.gateway.tls import Certificate

from .certificates import replace, trusting, write_pair
from .clock import Clock
from .http_port import GET, Recorder, Talker, all_of, answer, close, serving, told, until

ENDING = b"GET /first HTTP/1.1\r\nconnection: close\r\n\r\n"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path, "first")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_request_over_tls(pair: tuple[Path, Path], version: ssl.TLSVersion) -> None:
    client = trusting(pair[0])
    client.minimum_version = client.maximum_version = version
    client.set_alpn_protocols(["h2", "http/1.1"])
    async with serving(Recorder(), certificate=Certificate(*pair)) as port:
        reader, writer = await port.connect(client)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        writer.write(GET)
        assert (await answer(reader)).startswith(b"HTTP/1.1 200 OK")
        await close(writer)
        assert port.refused() == {}


def test_old_versions_are_not_spoken(pair: tuple[Path, Path]) -> None:
    assert Certificate(*pair).context().minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_certificate_is_exchanged_under_running_connections(
    tmp_path: Path, pair: tuple[Path, Path], clock: Clock
) -> None:
    old, new = trusting(pair[0]), write_pair(tmp_path, "second")
    new_client = trusting(new[0])
    async with serving(Recorder(), certificate=Certificate(*pair, clock)) as port:
        reader, writer = await port.connect(old)
        writer.write(GET)
        await answer(reader)
        replace(pair, new)
        clock.now_s += 2
        assert b"200 OK" in await port.talk(ENDING, tls=new_client)
        with pytest.raises(ssl.SSLCertVerificationError):
            await port.connect(old)
        writer.write(GET)
        await answer(reader)  # the old connection is none the wiser
        await close(writer)


def test_files_are_not_looked_at_all_the_time(tmp_path: Path, pair: tuple[Path, Path], clock: Clock) -> None:
    certificate = Certificate(*pair, clock)
    before = certificate.context()
    replace(pair, write_pair(tmp_path, "second"))
    clock.now_s += 0.5
    assert certificate.context() is before
    clock.now_s += 0.6
    assert certificate.context() is not before


@pytest.mark.parametrize("case", ["no certificate", "no key", "half an exchange", "garbage"])
def test_files_that_break_leave_the_old_certificate_in_force(
    tmp_path: Path, pair: tuple[Path, Path], clock: Clock, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(*pair, clock)
    before = certificate.context()
    new = write_pair(tmp_path, "second")
    if case == "no certificate":
        pair[0].unlink()
    elif case == "no key":
        pair[1].unlink()
    elif case == "half an exchange":
        new[0].replace(pair[0])
    else:
        pair[1].write_text("no key")
    for _ in range(3):
        clock.now_s += 2
        assert certificate.context() is before
    (record,) = told(caplog)  # told once, not at every look
    assert "the certificate read before stays in force" in record.getMessage()
    replace(pair, write_pair(tmp_path, "third"))
    clock.now_s += 2
    assert certificate.context() is not before


def test_files_that_are_wrong_from_the_start_are_named(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    cert, key = pair
    other_cert, other_key = write_pair(tmp_path, "second")
    _, locked = write_pair(tmp_path, "locked", b"secret")
    garbage = tmp_path / "garbage"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    for given, text in (
        ((tmp_path / "nowhere", key), "--tls-cert: cannot read .*nowhere: No such file"),
        ((cert, tmp_path / "nowhere"), "--tls-key: cannot read .*nowhere: No such file"),
        ((cert, other_key), "--tls-key: .*second.key is not the key of the certificate in .*first.crt"),
        ((other_cert, key), "--tls-key: .*first.key is not the key of the certificate in .*second.crt"),
        ((cert, locked), "--tls-key: .*locked.key wants a passphrase"),
        ((garbage, key), "garbage and .*first.key are not a certificate and its key in PEM"),
        ((cert, garbage), "first.crt and .*garbage are not a certificate and its key in PEM"),
    ):
        with pytest.raises(SettingsError, match=text):
            Certificate(*given)


async def test_plain_http_on_a_tls_port_is_refused_in_one_line(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    app = Recorder()
    async with serving(app, certificate=Certificate(*pair)) as port:
        for sent in (GET, b"\x00" * 100, b"\x16\x03\x01\x00\x05hello"):
            assert b"HTTP" not in await port.talk(sent)
        await until(lambda: port.refused() == {"tls_handshake": 3})
        assert b"200 OK" in await port.talk(ENDING, tls=trusting(pair[0]))
    assert app.paths == ["/first"]
    (record,) = told(caplog)
    assert "no TLS handshake" in record.getMessage()
    assert record.exc_info is None


async def test_a_handshake_that_does_not_come_is_waited_for_in_vain(pair: tuple[Path, Path]) -> None:
    """It counts as a connection meanwhile."""
    async with serving(Recorder(), certificate=Certificate(*pair), header_timeout_s=0.3, max_connections=1) as port:
        reader, writer = await port.connect()
        await until(lambda: len(port.server._opening) == 1)
        assert await port.talk() == b""
        assert port.refused() == {"too_many_connections": 1}
        assert await all_of(reader) == b""
        await close(writer)
        await until(lambda: port.refused() == {"too_many_connections": 1, "tls_handshake": 1})
        assert b"200 OK" in await port.talk(ENDING, tls=trusting(pair[0]))


async def test_who_only_connects_to_a_tls_port_is_no_case_for_the_log(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Recorder(), certificate=Certificate(*pair)) as port:
        _, writer = await port.connect()
        await until(lambda: len(port.server._opening) == 1)
        await close(writer)
        await until(lambda: not port.server._opening)
        assert port.refused() == {}
    assert told(caplog) == []


async def test_a_server_stops_in_the_middle_of_a_handshake(pair: tuple[Path, Path]) -> None:
    async with serving(Recorder(), certificate=Certificate(*pair)) as port:
        reader, writer = await port.connect()
        await until(lambda: len(port.server._opening) == 1)
    assert await all_of(reader) == b""
    await close(writer)


async def test_half_a_request_over_tls_is_408(pair: tuple[Path, Path]) -> None:
    async with serving(Recorder(), certificate=Certificate(*pair), header_timeout_s=0.2) as port:
        assert b"408" in await port.talk(b"GET / HTT", tls=trusting(pair[0]))
        assert port.refused() == {"header_timeout": 1}


async def test_a_client_that_reads_nothing_over_tls_is_disconnected(pair: tuple[Path, Path]) -> None:
    app = Talker()
    async with serving(app, certificate=Certificate(*pair), client_timeout_s=0.3, send_buffer_bytes=4096) as port:
        reader, writer = await port.connect(trusting(pair[0]))
        writer.write(GET)
        await asyncio.wait_for(reader.readexactly(100), 20)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: app.num_disconnects == 1)
        assert port.refused() == {"client_reads_nothing": 1}
        writer.transport.abort()
        await close(writer)
