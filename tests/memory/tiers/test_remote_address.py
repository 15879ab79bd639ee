"""Addresses of remote stores: known parameters are parsed, others are kept, passwords are never printed."""

import pytest

from spillover.errors import SpilloverError
from spillover.memory.tiers.remote_address import RemoteAddress


def test_our_parameters_are_taken_off() -> None:
    address = RemoteAddress.parse("rediss://me:s%40cret@host:7000/2?ttl=60&size=10GB&timeout=0.5&ssl_cert_reqs=none")
    assert address.url == "rediss://me:s%40cret@host:7000/2?ssl_cert_reqs=none"
    assert (address.ttl, address.size, address.timeout) == (60, 10**10, 0.5)
    assert address.shown == "rediss://host:7000/2"
    assert address.hide("AUTH me s@cret or s%40cret: no") == "AUTH *** *** or ***: no"
    assert "cret" not in repr(address)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://host", "redis://host:6379"),
        ("redis://[::1]:7/0", "redis://[::1]:7/0"),
        ("unix:///run/valkey.sock?db=1", "unix:///run/valkey.sock"),
        ("unix://user:pass@/run/valkey.sock", "unix:///run/valkey.sock"),
        ("redis://host?password=hidden", "redis://host:6379"),
    ],
)
def test_what_people_see(text: str, shown: str) -> None:
    address = RemoteAddress.parse(text)
    assert address.shown == shown
    assert (address.ttl, address.size, address.timeout) == (None, None, None)


def test_password_among_the_parameters_is_hidden_too() -> None:
    assert RemoteAddress.parse("redis://host?password=hid%20den").hide("a hid den word") == "a *** word"


@pytest.mark.parametrize(
    "text",
    [
        "localhost:6379",
        "http://:hidden@host",
        "redis://:hidden@host:port",
        "redis://:hid/den@host",
        "redis://:hidden@host/name",
        "redis://:hidden@host?ttl=0",
        "redis://:hidden@host?ttl=soon",
        "redis://:hidden@host?ttl=nan",
        "redis://:hidden@host?timeout=-1",
        "redis://:hidden@host?size=big",
        "redis://",
        "unix://",
        "",
    ],
)
def test_bad_addresses_are_refused_without_the_password(text: str) -> None:
    with pytest.raises(SpilloverError) as refused:
        RemoteAddress.parse(text)
    message = str(refused.value)
    assert "hid" not in message
    assert "\n" not in message
    assert len(message) > 20
