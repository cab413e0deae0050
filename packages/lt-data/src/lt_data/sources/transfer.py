"""What goes wrong between here and a server, as one kind of error that names no secret.

fsspec lets the errors of the libraries below it through: aiohttp's for http, botocore's for S3, httpx's for the hub.
None of those is imported here; what has not been imported cannot have been raised.
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lt_data.errors import DataError
from lt_data.storage import os_errors

_LIBRARIES = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
)
_OF_THIS_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # where a copy is kept meanwhile
_AGAIN = "check the network and the server, and run again"


@contextmanager
def transfer_errors(name: str, url: str) -> Iterator[None]:
    """Turn an error of the transfer in the block into a `DataError`.

    Args:
        name: the URL as it may be shown.
        url: the URL as it is, which is taken out of what the libraries say.
    """
    with os_errors("read", name):
        try:
            yield
        except FileNotFoundError:
            raise DataError(f"cannot read {name}: there is no such file; check the path") from None
        except (OSError, *library_errors()) as exc:
            if getattr(exc, "errno", None) in _OF_THIS_MACHINE:
                raise
            raise DataError(f"cannot read {name}: {_reason(exc, name, url)}; {_AGAIN}") from None


def library_errors() -> tuple[type[Exception], ...]:
    """The kinds of error that the libraries in use raise beside OSError."""
    return tuple(getattr(sys.modules[module], error) for module, error in _LIBRARIES if module in sys.modules)


def _reason(exc: BaseException, name: str, url: str) -> str:
    status, message = getattr(exc, "status", None), getattr(exc, "message", None)
    if isinstance(status, int):  # aiohttp, whose text would show the URL in another spelling
        return f"HTTP status {status} {message or ''}".strip()
    return (str(exc) or type(exc).__name__).replace(url, name)
