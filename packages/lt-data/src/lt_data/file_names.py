"""Locale-independent file names.

File names are bytes; Python decodes them by the locale, so one name is different text under different locales. Our
files therefore hold `to_portable_name`: the bytes decoded as UTF-8, invalid bytes kept as lone surrogates.
`to_local_name` converts it for the functions of the current locale. Under UTF-8 both change nothing.

A name that comes from a manifest, an index or a listing passes `check_name` before a file of that name is read, written
or deleted. Of URLs, messages and files hold `redact_url`.
"""

import os
from pathlib import PureWindowsPath
from urllib.parse import urlsplit, urlunsplit

from lt_data.errors import DataError

COMPRESSIONS = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstandard",
    ".zstd": "zstandard",
    ".bz2": "bzip2",
    ".xz": "xz",
}
"""Compression by the ending of a file's name."""


def check_name(name: object, source: object, error: type[ValueError] = DataError) -> str:
    r"""Return a name that stays inside the folder of what names it: relative, without empty parts, `.` and `..`.

    Args:
        name: what a manifest, an index or a listing gives; parts are separated by "/", a "\" is refused.
        source: file or address that gives it, for the message.
        error: class of the error.

    Raises:
        DataError: the name leads elsewhere, or is none.
    """
    if not isinstance(name, str):
        raise error(f"{source}: {name!r} is no file name")
    parts = name.split("/")
    if {"", ".", ".."} & {*parts} or "\\" in name or "\0" in name or PureWindowsPath(name).drive:
        raise error(f"{source}: file name {name!r} leads out of its folder; names are relative, without '..' or '\\\\'")
    return name


def to_portable_name(name: str) -> str:
    """Return the name of a local file as text that is the same under every locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def to_local_name(name: str) -> str:
    """Return a portable name as this process must pass it to the operating system."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def find_compression(name: str) -> str:
    """Return the ending of a file's name (in lower case) that tells its compression; "" if none does."""
    return next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")


def redact_url(url: str) -> str:
    """Return a URL without what may be secret.

    User and password are left out, of http and ftp also query and fragment, which may be signed. Chained URLs of fsspec
    (`simplecache::https://...`) are redacted link by link.
    """
    return "::".join(_redact_link(link) for link in url.split("::"))


def _redact_link(url: str) -> str:
    try:
        scheme, netloc, path, query, fragment = urlsplit(url)
    except ValueError:  # no URL, so no telling what of it is secret
        return f"{url.partition('://')[0]}://..."
    is_web = scheme in ("http", "https", "ftp", "sftp")
    if scheme == "hf" or not (is_web or "@" in netloc):
        return url
    return urlunsplit((scheme, netloc.rpartition("@")[2], path, *(("", "") if is_web else (query, fragment))))
