"""Locale-independent file names.

File names are bytes; Python decodes them by the locale, so one name is different text under different locales. Our
files therefore hold `to_portable_name`: the bytes decoded as UTF-8, invalid bytes kept as lone surrogates.
`to_local_name` converts it for the functions of the current locale. Under UTF-8 both change nothing.

Of URLs, messages and files hold `redact_url`.
"""

import os
from urllib.parse import urlsplit, urlunsplit


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
