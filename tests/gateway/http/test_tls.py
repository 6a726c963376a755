"""HTTPS: the handshake, certificates that change while clients are connected, wrong files, and clients without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.gateway.http.tls import Certificate

from ..certificates import replace, trusting, write_pair
from ..http_port import GET, Recorder, Talker, answer, close, serving, told, until

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
    assert Certificate(*pair).context.minimum_version == ssl.TLSVersion.TLSv1_2


async def test_a_certificate_is_exchanged_under_running_connections(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    certificate = Certificate(*pair)
    old, new = trusting(pair[0]), write_pair(tmp_path, "second")
    new_client = trusting(new[0])
    async with serving(Recorder(), certificate=certificate) as port:
        reader, writer = await port.connect(old)
        writer.write(GET)
        await answer(reader)
        replace(pair, new)
        await certificate.look_again()
        assert b"200 OK" in await port.talk(ENDING, tls=new_client)
        with pytest.raises(ssl.SSLCertVerificationError):
            await port.connect(old)
        writer.write(GET)
        await answer(reader)  # the old connection still works
        await close(writer)


async def test_the_server_looks_for_a_new_certificate_by_itself(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    async with serving(Recorder(), certificate=Certificate(*pair)) as port:
        new = write_pair(tmp_path, "second")
        client = trusting(new[0])
        replace(pair, new)
        async with asyncio.timeout(20):
            while True:  # polls: the server looks at the files once a second or two
                with contextlib.suppress(ssl.SSLCertVerificationError):
                    assert b"200 OK" in await port.talk(ENDING, tls=client)
                    break
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("case", ["no certificate", "no key", "half an exchange", "garbage"])
async def test_files_that_break_leave_the_old_certificate_in_force(
    tmp_path: Path, pair: tuple[Path, Path], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, old = Certificate(*pair), trusting(pair[0])
    new = write_pair(tmp_path, "second")
    if case == "no certificate":
        pair[0].unlink()
    elif case == "no key":
        pair[1].unlink()
    elif case == "half an exchange":
        new[0].replace(pair[0])
    else:
        pair[1].write_text("no key")
    async with serving(Recorder(), certificate=certificate) as port:
        for _ in range(3):
            await certificate.look_again()
            assert b"200 OK" in await port.talk(ENDING, tls=old)
        (record,) = told(caplog)  # one warning, not one at every look
        assert "the certificate read before stays in force" in record.getMessage()
        third = write_pair(tmp_path, "third")
        client = trusting(third[0])
        replace(pair, third)
        await certificate.look_again()
        assert b"200 OK" in await port.talk(ENDING, tls=client)


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


async def test_what_is_no_handshake_reaches_nobody_and_is_no_case_for_the_log(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    app = Recorder()
    async with serving(app, certificate=Certificate(*pair)) as port:
        for sent in (GET, b"\x00" * 100, b"\x16\x03\x01\x00\x05hello"):
            assert b"HTTP" not in await port.talk(sent)
        _, writer = await port.connect()  # connects and sends nothing
        await close(writer)
        assert b"200 OK" in await port.talk(ENDING, tls=trusting(pair[0]))
    assert app.paths == ["/first"]
    assert told(caplog) == []


async def test_connections_are_counted_behind_their_handshake(pair: tuple[Path, Path]) -> None:
    client = trusting(pair[0])
    async with serving(Recorder(), certificate=Certificate(*pair), max_connections=1) as port:
        _, silent = await port.connect()
        _, first = await port.connect(client)
        await until(lambda: len(port.server.server_state.connections) == 1)
        assert b"503 Service Unavailable" in await port.talk(tls=client)
        assert port.refused() == {"too_many_connections": 1}
        await close(first)
        await until(lambda: not port.server.server_state.connections)
        assert b"200 OK" in await port.talk(ENDING, tls=client)
        await close(silent)


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
