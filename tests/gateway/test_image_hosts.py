"""Which addresses of images are fetched: nothing but listed hosts, however an address is written."""

from __future__ import annotations

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.gateway.image_hosts import ImageHosts, WebAddress
from kvrelay.gateway.settings import GatewaySettings

HOSTS = ImageHosts(
    [
        "images.example.com",
        "*.cdn.example",
        "http://plain.example:9000",
        "ported.example:8443",
        "10.0.0.7",
        "[fd00::1]:8443",
        "xn--bcher-kva.example",
    ]
)


def allows(url: str, hosts: ImageHosts = HOSTS) -> bool:
    return hosts.allows(WebAddress.of(url))


@pytest.mark.parametrize(
    "url",
    [
        "https://images.example.com/a/b.png?x=1&y=%2f#there",
        "https://images.example.com",
        "https://images.example.com?x",
        "https://images.example.com:443/",
        "HTTPS://Images.EXAMPLE.com/",
        "https://images.example.com./",
        "https://a.cdn.example/",
        "https://a.b.CDN.example./",
        "http://plain.example:9000/",
        "https://ported.example:8443/",
        "https://10.0.0.7/",
        "https://[fd00::1]:8443/",
        "https://[FD00:0:0:0:0:0:0:1]:8443/",
        "https://xn--bcher-kva.example/",
    ],
)
def test_listed_hosts(url: str) -> None:
    assert allows(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com/",
        "https://images.example.com:8443/",
        "https://a.images.example.com/",
        "https://example.com/",
        "https://images.example.com.evil.example/",
        "https://evilimages.example.com/",
        "https://cdn.example/",
        "https://evilcdn.example/",
        "https://a.cdn.example.evil/",
        "http://a.cdn.example/",
        "https://a.cdn.example:8443/",
        "https://plain.example:9000/",
        "http://plain.example/",
        "https://ported.example/",
        "http://10.0.0.7/",
        "https://110.0.0.7/",
        "https://[fd00::1]/",
        "https://[fd00::2]:8443/",
        "https://[::ffff:10.0.0.7]/",
        "http://169.254.169.254/",
        "http://localhost/",
    ],
)
def test_other_hosts(url: str) -> None:
    assert not allows(url)
    assert not allows(url, ImageHosts([]))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://me:secret@images.example.com/", "it has a user or a password; leave them out"),
        ("https://secret@images.example.com/", "it has a user"),
        ("https://@images.example.com/", "it has a user"),
        ("https://images.example.com\\@secret.example/", "it has a user"),
        ("https://images.example.com:443@secret.example/", "it has a user"),
        ("https://secret.example\\.images.example.com/", "it is not https://HOST/PATH"),
        ("https://secret.example%2eimages.example.com/", "it is not https://HOST/PATH"),
        ("https:/images.example.com/secret", "it is not https://HOST/PATH"),
        ("https:images.example.com/secret", "it is not https://HOST/PATH"),
        ("//images.example.com/secret", "it is not https://HOST/PATH"),
        ("https:///secret", "it is not https://HOST/PATH"),
        ("https://?secret", "it is not https://HOST/PATH"),
        ("ftp://images.example.com/secret", "it is not https://HOST/PATH"),
        ("https://images.example.com:/secret", "it is not https://HOST/PATH"),
        ("https://images.example.com:+443/secret", "it is not https://HOST/PATH"),
        ("https://images.example.com:0/secret", "its port is not 1 to 65535"),
        ("https://images.example.com:65536/secret", "its port is not 1 to 65535"),
        ("https://[fd00::1%25eth0]/secret", "it is not https://HOST/PATH"),
        ("https://[fd00::1::2]/secret", "neither a name nor an IP address"),
        ("https://[10.0.0.7]/secret", "neither a name nor an IP address"),
        ("https://images..example.com/secret", "neither a name nor an IP address"),
        ("https://.images.example.com/secret", "neither a name nor an IP address"),
        ("https://images.example.com../secret", "neither a name nor an IP address"),
        ("https://-a.cdn.example/secret", "neither a name nor an IP address"),
        (f"https://{'a' * 64}.cdn.example/secret", "neither a name nor an IP address"),
        (f"https://{'a.' * 125}cdn.example/secret", "neither a name nor an IP address"),
        ("https://167772167/secret", "neither a name nor an IP address"),
        ("https://0xa000007/secret", "neither a name nor an IP address"),
        ("https://10.7/secret", "neither a name nor an IP address"),
        ("https://010.0.0.7/secret", "neither a name nor an IP address"),
        ("https://b\u00fccher.example/secret", "write its host as xn--"),
        ("https://images\uff0eexample.com/secret", "beyond ASCII"),
        ("https://images.example.com/a b?secret", "it has spaces"),
        ("https://images.example.com/ HTTP/1.1\r\nsecret: x", "it has spaces"),
        ("https://images.example.com/secret\n", "it has spaces"),
        ("https://images.example.com/" + "secret" * 1400, "characters, and may have 8192"),
    ],
)
def test_odd_urls_are_refused_without_being_quoted(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^its? ") as caught:
        WebAddress.of(url)
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_is_asked_for_is_the_clients_url_to_the_letter() -> None:
    """A host may have signed it."""
    path = "/a/../b%2fc;d?X-Sig=a%2Bb+c%7e~&e=%20&f"
    address = WebAddress.of(f"https://Images.example.com.:443{path}#x")
    assert address.url == f"https://images.example.com{path}"
    assert WebAddress.of("http://[FD00::0001]:8000").url == "http://[fd00::1]:8000/"
    assert WebAddress.of("http://x.example:443?q").url == "http://x.example:443/?q"


def test_a_place_is_shown_without_its_path() -> None:
    address = WebAddress.of("https://images.example.com/secret?secret")
    assert address.site == "https://images.example.com"
    assert "secret" not in repr(address)


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/c?d", "https://images.example.com/c?d"),
        ("c", "https://images.example.com/a/c"),
        ("//other.example/c", "https://other.example/c"),
        ("http://other.example:81/c", "http://other.example:81/c"),
    ],
)
def test_redirections_are_addresses(location: str, url: str) -> None:
    assert WebAddress.of("https://images.example.com/a/b?x").redirected(location).url == url


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "https://me@images.example.com/", "https://[", "//[x]/", "/\u00e9"]
)
def test_redirections_that_lead_nowhere(location: str) -> None:
    with pytest.raises(ValueError, match=r"^it "):
        WebAddress.of("https://images.example.com/a").redirected(location)


@pytest.mark.parametrize(
    "entry",
    [
        "*", "*.", "*.com", "*.10.0.0.7", "*.[fd00::1]", "a.*.example", "*a.example", "**.a.example",
        "https://a.example/", "https://a.example/images", "a.example?x", "me@a.example", "ftp://a.example", "//a.example",
        "a.example:0", "a.example:https", "a b.example", "b\u00fccher.example", "fd00::1", "10.0.0",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(SettingsError, match=r"--image-hosts.*write images\.example\.com") as caught:
        build(GatewaySettings, {"image_hosts": [entry]})
    assert repr(entry) in str(caught.value)


def test_hosts_are_listed_with_commas() -> None:
    hosts = build(GatewaySettings, {"image-hosts": "images.example.com,*.cdn.example"}).image_hosts
    assert hosts == ("images.example.com", "*.cdn.example")
    assert build(GatewaySettings, {}).image_hosts == ()
