"""Strings of bounded length in xgrammar's grammars of JSON schemas, in a form whose masks are quick to fill.

xgrammar 0.2.8 has a string of at most 2 characters as

    text ::= (("\\"" text_characters{0, 2} "\\""))

and makes nested rules of it that end before the closing quote: c1 ::= "" | [^"] c2, c2 ::= "" | [^"]. So no rule knows
that only a quote may follow, and near the end of the string the tokens that are too long, most of a vocabulary, are
tried one by one whenever a mask is filled: 1 to 4 ms instead of 2 us. Rules that hold the quote know it from the start,

    text ::= "\\"" s2
    s2 ::= "\\"" | [^"] s1
    s1 ::= "\\"" | [^"] s0
    s0 ::= "\\""

and strings of other lengths share them. The language is the same, to the token.
"""

from __future__ import annotations

import re

MAX_LENGTH = 128  # longer ones are counted, which is quick
CHARACTER = r"[^\"\\\r\n]"  # of a string with a length, as xgrammar writes it
_STRING = re.compile(r'^(\w+) ::= \(\("\\"" (\w+)\{(\d+), (\d+)\} "\\""\)\)$', re.MULTILINE)


def unrolled(ebnf: str) -> str:
    """The grammar, as xgrammar prints one that it made of a JSON schema, with short strings in the quick form; what
    looks otherwise stays as it is."""
    characters = set(re.findall(rf"^(\w+) ::= \(\({re.escape(CHARACTER)}\)\)$", ebnf, re.MULTILINE))
    prefix = "short_string"
    while prefix in ebnf:
        prefix += "_"
    needed: dict[tuple[int, int], None] = {}  # least and most characters until the quote

    def replace(found: re.Match[str]) -> str:
        name, body, least, most = found[1], found[2], int(found[3]), int(found[4])
        if body not in characters or not least <= most <= MAX_LENGTH:
            return found[0]
        for used in range(most + 1):
            if (rule := (max(least - used, 0), most - used)) in needed:
                break  # and so are all that it leads to
            needed[rule] = None
        return f'{name} ::= "\\"" {prefix}_{least}_{most}'

    changed = _STRING.sub(replace, ebnf)
    return "\n".join([changed.rstrip("\n"), *(_rule(prefix, least, most) for least, most in needed), ""])


def _rule(prefix: str, least: int, most: int) -> str:
    choices = [] if least else ['"\\""']
    if most:
        choices.append(f"{CHARACTER} {prefix}_{max(least - 1, 0)}_{most - 1}")
    return f"{prefix}_{least}_{most} ::= {' | '.join(choices)}"
