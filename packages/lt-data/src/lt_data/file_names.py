"""Locale-independent file names.

File names are bytes; Python decodes them by the locale, so one name is different text under different locales. Our
files therefore hold `to_portable_name`: the bytes decoded as UTF-8, invalid bytes kept as lone surrogates.
`to_local_name` converts it for the functions of the current locale. Under UTF-8 both change nothing.
"""

import os


def is_plain_name(name: str) -> bool:
    """Return True if a name can be that of an entry of a folder, and of nothing outside it."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
        and len(name.encode("utf-8", "replace")) <= 255
    )


def to_portable_name(name: str) -> str:
    """Return the name of a local file as text that is the same under every locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def to_local_name(name: str) -> str:
    """Return a portable name as this process must pass it to the operating system."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))
