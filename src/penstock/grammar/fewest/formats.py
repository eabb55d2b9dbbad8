"""String formats of JSON Schema as regular expressions: those that llguidance supports, from their standards."""

from __future__ import annotations

__all__ = ["FORMATS"]

_HEX = "[0-9a-fA-F]"
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])|[0-9]{4}-(0[13-9]|1[0-2])-30|[0-9]{4}-(0[13578]|1[02])-31"
_ZONE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_ZONE}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]{_ZONE})"
_CLOCK = "[0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S"
_DAYS = "[0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_OCTET = "([0-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = f"{_HEX}{{1,4}}"
_SHORTENED = (f"({_GROUP}(:{_GROUP}){{0,{left - 1}}})?::({_GROUP}(:{_GROUP}){{0,{6 - left}}})?" for left in range(1, 7))
_PATH = f"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})[tT]{_TIME}",
    "duration": f"P(({_DAYS})(T({_CLOCK}))?|T({_CLOCK})|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": "|".join(
        (f"{_GROUP}(:{_GROUP}){{7}}", f"{_GROUP}(:{_GROUP}){{6}}::", f"::{_GROUP}(:{_GROUP}){{6}}", *_SHORTENED)
    ),
    "uri": f"[a-zA-Z][a-zA-Z0-9+.-]*:(//{_PATH}*)?(/?{_PATH}+(/{_PATH}*)*|/?)([?]({_PATH}|[/?])*)?(#({_PATH}|[/?])*)?",
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
}
"""From RFC 3339 (durations: its appendix A), 5321, 1123, 2673, 4291, 3986 and 4122; host labels may have any length."""
