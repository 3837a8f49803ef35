"""Supported values of `format`, as patterns.

Some are narrower than their standards: ASCII host names and addresses, no leap seconds, URIs without IPv6 hosts.
Formats that JSON Schema does not define, such as OpenAPI's `int32` or `password`, do not constrain values, as its
standard says.
"""

from __future__ import annotations

from collections.abc import Mapping

_YEAR = r"\d{4}"
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAYS = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
# Without the year 0000, which date libraries refuse.
_DATE = rf"(?!0000)(?:{_YEAR}-{_DAYS}|{_LEAP}-02-29)"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d"
_TIME = rf"{_CLOCK}:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+-]{_CLOCK})"
_LABEL = r"[A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_SHORT_HOST = rf"(?=.{{1,63}}$){_HOST}"  # so that no label is longer
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_H16 = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_H16}:){{7}}{_H16}",
        r"::",
        *(rf"(?:{_H16}:){{{before}}}(?::{_H16}){{1,{7 - before}}}" for before in range(1, 7)),
        rf"(?:{_H16}:){{1,7}}:",
        rf":(?::{_H16}){{1,7}}",
    ]
)
_UNRESERVED = r"[A-Za-z0-9._~!$&'()*+,;=:@-]"
_PCHAR = rf"(?:{_UNRESERVED}|%[0-9A-Fa-f]{{2}})"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_PATH = rf"(?:/{_PCHAR}*)*"
_AUTHORITY = rf"//{_HOST}(?::\d{{1,5}})?{_PATH}"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}|{_PCHAR}+{_PATH}){_TAIL}"
_REFERENCE = rf"(?:{_URI}|{_AUTHORITY}{_TAIL}|{_PATH}{_TAIL})"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_DURATION_TIME = r"T(?:\d{1,9}H(?:\d{1,9}M(?:\d{1,9}S)?)?|\d{1,9}M(?:\d{1,9}S)?|\d{1,9}S)"
_DURATION_DATE = r"(?:\d{1,9}Y(?:\d{1,9}M(?:\d{1,9}D)?)?|\d{1,9}M(?:\d{1,9}D)?|\d{1,9}D)"

FORMATS: Mapping[str, str] = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "duration": rf"^P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|\d{{1,9}}W)$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_HOST}$",
    "idn-email": rf"^{_ATOM}(?:\.{_ATOM})*@{_HOST}$",
    "hostname": rf"^{_SHORT_HOST}$",
    "idn-hostname": rf"^{_SHORT_HOST}$",
    "ipv4": rf"^{_IPV4}$",
    "ipv6": rf"^(?:{_IPV6})$",
    "uuid": r"^[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}$",
    "uri": rf"^{_URI}$",
    "uri-reference": rf"^{_REFERENCE}$",
    "iri": rf"^{_URI}$",
    "iri-reference": rf"^{_REFERENCE}$",
    "json-pointer": rf"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9]\d{{0,8}})(?:#|{_POINTER})$",
}
UNSUPPORTED_FORMATS = ("regex", "uri-template")
