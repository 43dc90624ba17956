"""The enforced formats of strings; other formats are annotations, as JSON Schema allows."""

from __future__ import annotations

# Annotations of OpenAPI and pydantic on a value's meaning.
NOTE_FORMATS = {
    "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal", "byte", "binary",
    "base64", "base64url", "name-email", "multi-host-uri", "ipvanyaddress", "ipvanynetwork", "ipvanyinterface",
    "ipv4network", "ipv6network", "ipv4interface", "ipv6interface", "password", "path", "file-path",
    "directory-path", "json-string", "color", "html", "markdown",
}  # fmt: skip
ENFORCED_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# llguidance accepts the year 0, a 29th of February in any year, and a leap second in any minute.
LEAP_DIGITS = "(0[48]|[2468][048]|[13579][26])"  # two digits divisible by four, except 00
YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
DATE = f"({YEAR}-((0[13-9]|1[0-2])-[0-9]{{2}}|02-([01][0-9]|2[0-8]))|([0-9]{{2}}{LEAP_DIGITS}|{LEAP_DIGITS}00)-02-29)"
# Nor does it bound the number of digits; a model could write digits forever.
SECONDS = r"[0-5][0-9](\.[0-9]{1,9})?[Zz+-].{0,5}$"
STRICTER_PATTERNS = {
    "date": f"^{DATE}",
    "date-time": f"^{DATE}.{{7}}{SECONDS}",
    "time": f"^.{{6}}{SECONDS}",
    "duration": "^P(T?[0-9]{1,6}[YMWDHS])+$",
    "email": "^[^@]{1,64}@[^@]{1,63}$",
}
