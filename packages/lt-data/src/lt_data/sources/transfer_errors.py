"""Translation of transfer errors to `DataError`, without secrets in the message.

fsspec does not wrap the errors of its libraries: aiohttp for http, botocore for S3, httpx for the hub. None of them is
imported here; a library that is not imported cannot have raised an error.
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lt_data.errors import DataError
from lt_data.storage import translate_os_errors

_LIBRARIES = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
)
_LOCAL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)  # of the disk of a temporary copy
_RETRY_HINT = "check the network and the server, and run again"


@contextmanager
def translate_transfer_errors(name: str, url: str) -> Iterator[None]:
    """Convert a transfer error of the block to a `DataError`.

    Args:
        name: the redacted URL.
        url: the URL, which is replaced in the libraries' messages.
    """
    with translate_os_errors("read", name):
        try:
            yield
        except FileNotFoundError:
            raise DataError(f"cannot read {name}: there is no such file; check the path") from None
        except (OSError, *library_errors()) as exc:
            if getattr(exc, "errno", None) in _LOCAL_ERRNOS:
                raise
            raise DataError(f"cannot read {name}: {_reason(exc, name, url)}; {_RETRY_HINT}") from None


@contextmanager
def translate_answer_errors(name: str) -> Iterator[None]:
    """Convert errors of a library that cannot read an answer to `DataError`.

    They are errors that a bug would raise too, so the block should have little but calls of the library.

    Args:
        name: the redacted URL.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, RecursionError) as exc:
        reason = f"the server answers in a form that the library cannot read ({type(exc).__name__})"
        raise DataError(f"cannot read {name}: {reason}; check the server's address, such as HF_ENDPOINT") from exc


def library_errors() -> tuple[type[Exception], ...]:
    """Return the error classes of the imported libraries, besides OSError."""
    return tuple(getattr(sys.modules[module], error) for module, error in _LIBRARIES if module in sys.modules)


def _reason(exc: BaseException, name: str, url: str) -> str:
    status, message = getattr(exc, "status", None), getattr(exc, "message", None)
    if isinstance(status, int):  # aiohttp, whose message has the URL in another spelling
        return f"HTTP status {status} {message or ''}".strip()
    return (str(exc) or type(exc).__name__).replace(url, name)
