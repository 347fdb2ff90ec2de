"""Regular expressions for the values of ``format`` in JSON Schema.

Each expression matches texts that all readers accept.  For example RFC 3339 has a year 0 and leap seconds, but Python's
``datetime`` has neither, so neither is allowed.  Letters for which either case is valid have their usual case.
"""

from __future__ import annotations

from collections.abc import Iterable

HOUR, MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # two digits of a number that 4 divides, without 00
LEAP_YEAR = f"(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
TIME = rf"{HOUR}:{MINUTE}:{MINUTE}(?:\.[0-9]{{1,9}})?(?:Z|[+-]{HOUR}:{MINUTE})"

_MINUTES = "[0-9]+M(?:[0-9]+S)?"
_TIME = f"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES}|[0-9]+S)"
_MONTHS = "[0-9]+M(?:[0-9]+D)?"
DURATION = f"P(?:(?:[0-9]+Y(?:{_MONTHS})?|{_MONTHS}|[0-9]+D)(?:{_TIME})?|{_TIME}|[0-9]+W)"  # RFC 3339, appendix A

OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"(?:{OCTET}\.){{3}}{OCTET}"
H16 = "[0-9a-fA-F]{1,4}"
LS32 = f"(?:{H16}:{H16}|{IPV4})"
IPV6 = (
    "(?:"
    + "|".join(
        (
            f"(?:{H16}:){{6}}{LS32}",
            f"::(?:{H16}:){{5}}{LS32}",
            f"(?:{H16})?::(?:{H16}:){{4}}{LS32}",
            f"(?:(?:{H16}:){{0,1}}{H16})?::(?:{H16}:){{3}}{LS32}",
            f"(?:(?:{H16}:){{0,2}}{H16})?::(?:{H16}:){{2}}{LS32}",
            f"(?:(?:{H16}:){{0,3}}{H16})?::{H16}:{LS32}",
            f"(?:(?:{H16}:){{0,4}}{H16})?::{LS32}",
            f"(?:(?:{H16}:){{0,5}}{H16})?::{H16}",
            f"(?:(?:{H16}:){{0,6}}{H16})?::",
        )
    )
    + ")"
)

# RFC 1123, without "--", which in the third place of a label would require IDNA. The last label begins with a letter,
# so that no address of four numbers is a name.
LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9])*"
HOSTNAME = rf"(?:{LABEL}\.)*[a-zA-Z](?:-?[a-zA-Z0-9])*"
SHORT_LABELS = r"[^.]{1,63}(?:\.[^.]{1,63})*"
ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"  # RFC 5321: the local part is a Dot-string, followed by a domain
LOCAL = rf"{ATOM}(?:\.{ATOM})*"

_PCHAR = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_REG_NAME = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})*"
_USER = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})*"
_FUTURE = r"v[0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+"
_AUTHORITY = rf"(?:{_USER}@)?(?:\[(?:{IPV6}|{_FUTURE})\]|{_REG_NAME})(?::[0-9]*)?"
_PATH = rf"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*|)"
URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:{_PATH}(?:\?(?:{_PCHAR}|[/?])*)?(?:\#(?:{_PCHAR}|[/?])*)?"  # RFC 3986

UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

# name of a format -> expressions that must all match the whole string
FORMATS: dict[str, tuple[str, ...]] = {
    "date": (DATE,),
    "time": (TIME,),
    "date-time": (f"{DATE}T{TIME}",),
    "duration": (DURATION,),
    "email": (rf"{LOCAL}@{HOSTNAME}", rf"[^@]{{1,64}}@{SHORT_LABELS}", ".{1,254}"),
    "hostname": (HOSTNAME, SHORT_LABELS, ".{1,253}"),
    "ipv4": (IPV4,),
    "ipv6": (IPV6,),
    "uri": (URI,),
    "uuid": (UUID,),
}
# formats that only describe the purpose of a string and do not restrict it
ANNOTATIONS = frozenset(("binary", "byte", "directory-path", "file-path", "password", "path"))
# one expression per format, for a library that accepts only one; the bounds exclude only long texts
_NAME = "(?:[a-zA-Z0-9]{1,20}(?:-[a-zA-Z0-9]{1,20})?[.]){0,4}[a-zA-Z]{1,20}"
ONE_EACH = {**FORMATS, "email": (r"[\w+\-]{1,20}(?:\.[\w+\-]{1,20}){0,2}@" + _NAME,), "hostname": (_NAME,)}


def unknown_format(name: str, formats: Iterable[str] = FORMATS) -> ValueError:
    """Return the error about a ``format`` of JSON Schema that is not supported."""
    known = ", ".join(sorted({*formats, *ANNOTATIONS}))
    return ValueError(f"the format {name:.60} is not supported: expected one of {known}")
