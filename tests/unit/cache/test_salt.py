"""Salts of prefixes: what differs in any field is another salt, whatever clients choose as theirs."""

from __future__ import annotations

from itertools import product

from minisgl_backend.cache.salt import prefix_salt, salt_keys


def test_no_two_sets_of_fields_have_one_salt() -> None:
    users = (None, "a", "ab", "\x00", prefix_salt("a", b"d" * 16).decode("latin-1"))
    fields = list(product(users, (b"", b"d" * 16, b"e" * 16), (0, 1, 256)))
    assert len({prefix_salt(*one) for one in fields}) == len(fields)


def test_a_clients_salt_alone_is_its_bytes() -> None:
    assert (prefix_salt(None), prefix_salt("tenant")) == (b"", b"tenant")
    assert not prefix_salt("tenant", b"d").startswith(b"tenant")


def test_subscribers_of_kv_events_read_the_fields() -> None:
    assert salt_keys(b"") == ()
    assert salt_keys(prefix_salt("tenant")) == ("tenant",)
    assert salt_keys(prefix_salt(None, b"\x01\x02")) == ("adapter:0102",)
    assert salt_keys(prefix_salt("tenant", b"\x01\x02", 7)) == ("generation:7", "adapter:0102", "tenant")
