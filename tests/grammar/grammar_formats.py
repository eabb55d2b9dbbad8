"""The formats of strings, read off the standards that define them; some accept more than the standard."""

from __future__ import annotations

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"({_GROUP}:){{7}}{_GROUP}"]
    + [f"(({_GROUP}:){{0,{left - 1}}}{_GROUP})?::(({_GROUP}:){{0,{6 - left}}}{_GROUP})?" for left in range(1, 7)]
    + [f"({_GROUP}:){{0,6}}{_GROUP}::", f"::({_GROUP}:){{0,6}}{_GROUP}"]
)
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_ATEXT = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_CLOCK = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATEXT}(\.{_ATEXT})*@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": r"[a-zA-Z][a-zA-Z0-9+\-.]*:[a-zA-Z0-9\-._~:/?#\[\]@!$&'()*+,;=%]*",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
"""From RFC 3339 (appendix A for durations), 5321, 1123, 4291, 3986 and 4122; some accept more than the standard."""
