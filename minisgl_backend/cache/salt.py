"""The salt of a prompt in the prefix cache: all that decides its keys and values besides its tokens."""

from __future__ import annotations

_STRUCTURED = b"\xff"  # begins no text in UTF-8, so that no client's salt looks like one with other fields


def prefix_salt(user: str | None, adapter: bytes = b"", generation: int = 0) -> bytes:
    """user: the request's `cache_salt`; adapter: the digest of its adapter; generation: of the weights, which is never
    used twice in a process. A client's salt alone is its bytes, as routers know it from KV events; with other fields
    each has its length in front, so that none can continue another."""
    text = user.encode() if user else b""
    if not adapter and not generation:
        return text
    fields = (generation.to_bytes(8, "big"), adapter, text)
    return _STRUCTURED + b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def salt_keys(salt: bytes) -> tuple[str, ...]:
    """The same as texts for subscribers of KV events: the client's salt, or all fields."""
    if not salt.startswith(_STRUCTURED):
        return (salt.decode(),) if salt else ()
    fields, rest = [], salt[1:]
    while rest:
        end = 4 + int.from_bytes(rest[:4], "big")
        fields.append(rest[4:end])
        rest = rest[end:]
    generation, adapter, user = fields
    named = (f"generation:{int.from_bytes(generation, 'big')}", f"adapter:{adapter.hex()}", user.decode())
    return tuple(text for text, field in zip(named, fields, strict=True) if field.strip(b"\0"))
