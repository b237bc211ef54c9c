"""Sanitizes the store's contents before they are decoded: any client with access to a run's keys can write anything.

Texts reach terminals, pages and labels, so control characters are replaced and long texts are cut; numbers reach
arithmetic, so numbers that are not finite or exceed 64 bits are refused. Pure.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

LONGEST_TEXT = 4000
"""Maximum characters of one text; the longest that this package writes is the reason of a round."""
MOST_BYTES = 8 << 20
"""etcd's default limit of a request is 1.5 MiB."""
_LARGEST = 2**63 - 1
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move a cursor, begin an escape sequence or a line, or change the writing direction."""
_SUSPECT = re.compile(
    rb"[\x00-\x1f\x7f\\]|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]"
    rb"|NaN|Infinity|[0-9]{22}|[eE]\+?[0-9]{3}" + rb'|"[^"]{%d}' % (LONGEST_TEXT + 1)
)
"""Only values with these bytes need a closer look."""
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_CONTROL_BYTES = bytes((*range(32), 127, ord("\\")))


def cleaned(value: bytes) -> bytes:
    """The JSON ``value`` with sanitized texts. Raises ValueError for a number that is refused."""
    if len(value) > MOST_BYTES:
        raise ValueError(f"{len(value)} bytes are too many")
    if _plainly_harmless(value) or _SUSPECT.search(value) is None:
        return value
    try:
        found = json.loads(value, parse_constant=_refused, parse_float=_finite, parse_int=_bounded)
        return json.dumps(_harmless(found)).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _plainly_harmless(value: bytes) -> bool:
    """Whether _SUSPECT cannot match: nearly all documents are short and ASCII, and this takes a tenth of its time."""
    if len(value) > LONGEST_TEXT or not value.isascii() or len(value.translate(None, _CONTROL_BYTES)) < len(value):
        return False
    alike = value.translate(_ALIKE)
    return not any(mark in alike for mark in (b"0" * 22, b"e000", b"e+000", b"NaN", b"Infinity"))


def plain(text: str) -> str:
    """``text`` for a terminal: control characters as ``\\x1b`` or ``\\u202e``, nothing beyond LONGEST_TEXT."""
    short = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
    return _CONTROL.sub(lambda match: _escaped(match.group()), short)


def _escaped(character: str) -> str:
    if character in "\t\n\r":
        return " "
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _harmless(found: Any) -> Any:
    if isinstance(found, str):
        return plain(found)
    if isinstance(found, list):
        return [_harmless(each) for each in found]
    if isinstance(found, dict):
        return {plain(name): _harmless(each) for name, each in found.items()}
    return found


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _bounded(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) > _LARGEST:
        raise ValueError("a number is too large")
    return number
