"""File systems of URLs, and translation of transfer errors to `DataError`, without secrets in the message.

fsspec does not wrap the errors of its libraries: aiohttp for http, botocore for S3, httpx for the hub. None of them is
imported here; a library that is not imported cannot have raised an error.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lt_data.errors import DataError, describe_os_error

_LIBRARIES = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
)
_DECOMPRESSION = (("zlib", "error"), ("gzip", "BadGzipFile"), ("lzma", "LZMAError"), ("zstandard", "ZstdError"))


def open_filesystem(url: str, shown: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and its path there; `shown` is the redacted URL."""
    from fsspec.core import url_to_fs  # imported here: slow, and most corpora are local

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as exc:
        protocol = url.partition("://")[0]
        remedy = 'pip install "lt-data[s3]"' if protocol == "s3" else f"install the fsspec package for {protocol}://"
        raise DataError(f"cannot read {shown}: {str(exc).replace(url, shown)}; {remedy}") from exc


@contextmanager
def translate_transfer_errors(name: str, url: str) -> Iterator[None]:
    """Convert an error of the file system, or of the transfer, in the block to a `DataError`.

    Args:
        name: the path or redacted URL.
        url: the URL, which is replaced in the libraries' messages.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno is None:  # of a library
            raise DataError(_describe(exc, name, url)) from None
        raise DataError(f"cannot read {describe_os_error(exc, name)}") from exc
    except library_errors() as exc:
        raise DataError(_describe(exc, name, url)) from None


def library_errors() -> tuple[type[Exception], ...]:
    """Return the error classes of the imported libraries of transfers, besides OSError."""
    return _find_classes(_LIBRARIES)


def decompression_errors() -> tuple[type[Exception], ...]:
    """Return the error classes of the imported libraries of compressions for damaged data; that of bz2 is OSError."""
    return EOFError, *_find_classes(_DECOMPRESSION)


def _find_classes(names: Sequence[tuple[str, str]]) -> tuple[type[Exception], ...]:
    return tuple(getattr(sys.modules[module], error) for module, error in names if module in sys.modules)


def _describe(exc: BaseException, name: str, url: str) -> str:
    status, message = getattr(exc, "status", None), getattr(exc, "message", None)
    reason = (str(exc) or type(exc).__name__).replace(url, name)
    if isinstance(status, int):  # aiohttp, whose message has the URL in another spelling
        reason = f"HTTP status {status} {message or ''}".strip()
    elif isinstance(exc, FileNotFoundError):
        reason = "there is no such file"
    return f"cannot read {name}: {reason}; check the path, the network and the server, and run again"
