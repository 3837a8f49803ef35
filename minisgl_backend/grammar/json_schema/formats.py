r"""Supported values of `format`, as patterns.

Some are narrower than their standards: ASCII host names and addresses, no leap seconds, URIs without IPv6 hosts.
Formats that JSON Schema does not define, such as OpenAPI's `int32` or `password`, do not constrain values, as its
standard says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# A name and its pattern a line; <NAME> stands for the pattern of an earlier line. The year 0000 is left out, which date
# libraries refuse; <SHORT> looks ahead, so that no label of a host name is longer.
_PATTERNS = r"""
    LEAP        (?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)
    LONG_MONTH  (?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])
    DAYS        (?:<LONG_MONTH>|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))
    DATE        (?!0000)(?:\d{4}-<DAYS>|<LEAP>-02-29)
    CLOCK       (?:[01]\d|2[0-3]):[0-5]\d
    TIME        <CLOCK>:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-]<CLOCK>)
    N           \d{1,9}
    HOURS       T(?:<N>H(?:<N>M(?:<N>S)?)?|<N>M(?:<N>S)?|<N>S)
    YEARS       (?:<N>Y(?:<N>M(?:<N>D)?)?|<N>M(?:<N>D)?|<N>D)
    LABEL       [A-Za-z0-9]+(?:-+[A-Za-z0-9]+)*
    HOST        <LABEL>(?:\.<LABEL>)*
    SHORT       (?=.{1,63}$)<HOST>
    ATOM        [A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+
    EMAIL       <ATOM>(?:\.<ATOM>)*@<HOST>
    BYTE        (?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)
    H           [0-9A-Fa-f]{1,4}
    INNER       (?:<H>:){1}(?::<H>){1,6}|(?:<H>:){2}(?::<H>){1,5}|(?:<H>:){3}(?::<H>){1,4}
    LATER       (?:<H>:){4}(?::<H>){1,3}|(?:<H>:){5}(?::<H>){1,2}|(?:<H>:){6}(?::<H>){1,1}
    PCHAR       (?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})
    TAIL        (?:\?(?:<PCHAR>|[/?])*)?(?:#(?:<PCHAR>|[/?])*)?
    PATH        (?:/<PCHAR>*)*
    AUTHORITY   //<HOST>(?::\d{1,5})?<PATH>
    URI         [A-Za-z][A-Za-z0-9+.-]*:(?:<AUTHORITY>|<PCHAR>+<PATH>)<TAIL>
    REFERENCE   (?:<URI>|<AUTHORITY><TAIL>|<PATH><TAIL>)
    POINTER     (?:/(?:[^/~]|~[01])*)*
    date                    <DATE>
    time                    <TIME>
    date-time               <DATE>T<TIME>
    duration                P(?:<YEARS>(?:<HOURS>)?|<HOURS>|<N>W)
    email                   <EMAIL>
    idn-email               <EMAIL>
    hostname                <SHORT>
    idn-hostname            <SHORT>
    ipv4                    (?:<BYTE>\.){3}<BYTE>
    ipv6                    (?:(?:<H>:){7}<H>|::|<INNER>|<LATER>|(?:<H>:){1,7}:|:(?::<H>){1,7})
    uuid                    [0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}
    uri                     <URI>
    uri-reference           <REFERENCE>
    iri                     <URI>
    iri-reference           <REFERENCE>
    json-pointer            <POINTER>
    relative-json-pointer   (?:0|[1-9]\d{0,8})(?:#|<POINTER>)
"""
UNSUPPORTED_FORMATS = ("regex", "uri-template")


def _formats() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, pattern in (line.split() for line in _PATTERNS.strip().splitlines()):
        found[name] = re.sub("<([A-Z_]+)>", lambda reference: found[reference[1]], pattern)
    return {name: f"^{pattern}$" for name, pattern in found.items() if name.islower()}


FORMATS: Mapping[str, str] = _formats()
