"""Requests to a Hugging Face hub by huggingface_hub, which `tokenizers` brings.

The library asks, follows redirects and goes on after a broken connection. Kept around it:

- The token goes to the endpoint of HF_ENDPOINT alone: over https, or unencrypted to this machine with no proxy between.
  Of a redirect to another scheme, host or port the library drops it.
- An answer has at most the bytes that the caller allows.
- Messages quote no URL after a redirect, which may be signed, and no token.

Cost: one request per answer and break of the line; answers are held in memory.
"""

import io
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from huggingface_hub import constants, errors, get_token
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from lt_data import strict_json
from lt_data.errors import DataError

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_LIST_BYTES = 2**26
TRIES = 4
PAUSE_S = 1.0
_ENDPOINT = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?(/[a-z0-9._~%/-]*)?", re.IGNORECASE)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_TOKEN_ERRORS = tuple(getattr(errors, name) for name in ("OIDCError", "DeviceCodeError") if hasattr(errors, name))
_PROGRESS_BAR = "huggingface_hub.http_get"


class _PassingError(Exception):
    """Failure that may pass: a reset, a timeout, a busy server."""


@dataclass(frozen=True, kw_only=True)
class HubClient:
    """Hub of HF_ENDPOINT.

    Attributes:
        endpoint: address, without a slash at the end.
        token: sent to it and to no one else; None if there is none or it must not be sent.
        withheld: reason why no token is sent, or empty.
    """

    endpoint: str
    token: str | None = field(repr=False)
    withheld: str

    @classmethod
    def from_environment(cls) -> "HubClient":
        """Read HF_ENDPOINT, and look for a token where Hugging Face's tools do.

        Raises:
            DataError: the endpoint is not a plain http(s) address, or what is found cannot be a token.
        """
        endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if not _ENDPOINT.fullmatch(endpoint):
            raise DataError(f"HF_ENDPOINT: not a plain http(s) address such as {DEFAULT_ENDPOINT}, without credentials")
        withheld = find_reason_to_withhold(endpoint)
        try:
            token = None if withheld else get_token()
        except (OSError, *_TOKEN_ERRORS) as exc:
            raise DataError(
                f"HF_TOKEN, {constants.HF_TOKEN_PATH} or HF_OIDC_RESOURCE: no token can be had ({type(exc).__name__})"
            ) from exc
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise DataError("HF_TOKEN (or the token file): holds blanks or other characters, so it cannot be a token")
        return cls(endpoint=endpoint, token=token, withheld=withheld)

    def read_info(self, path: str, what: str) -> dict[str, Any]:
        """Return the JSON object that describes a repository; its "sha" is a commit.

        Args:
            path: path of the endpoint, quoted, with a leading slash.
            what: address of the repository, for messages.

        Raises:
            DataError: the hub refuses, does not answer, or answers something else.
        """
        raw = self.read(path, what, max_bytes=MAX_LIST_BYTES)
        info = strict_json.load_object(raw, f"{what}: the answer of {self.endpoint}", "check HF_ENDPOINT")
        if not isinstance(info.get("sha"), str) or not re.fullmatch(r"[0-9a-f]{40}", info["sha"]):
            raise DataError(f"{what}: {self.endpoint} names no commit: not the answer of a hub; check HF_ENDPOINT")
        return info

    def read(self, path: str, what: str, *, max_bytes: int) -> bytes:
        """Return an answer of at most `max_bytes`; arguments and errors as for `read_info`."""
        headers = {"Accept-Encoding": "identity", "User-Agent": "lt-data"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        reason = ""
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE_S * 2**number)
            answer = _BoundedAnswer(max_bytes, what)
            try:
                with _translate_errors(self, what), _without_progress_bar():
                    http_get(self.endpoint + path, answer, headers=headers)
                return answer.getvalue()
            except _PassingError as exc:
                reason = str(exc)
        raise DataError(
            f"{what}: {self.endpoint} does not answer ({reason}); given up after {TRIES} tries: check the network and "
            "HF_ENDPOINT, or name local files instead"
        )

    def explain_refusal(self, what: str, status: int) -> str:
        """Return a sentence on an answer that says no."""
        if status == 404:
            return "there is no such repository or revision on the hub, nor a folder of that name here (HTTP 404)"
        if status not in (401, 403):
            return f"the hub refuses (HTTP {status})"
        who = "the token given has no access to it"
        if self.token is None:
            who = "it is private, gated, or not there, and no token was sent"
        return (
            f"{who} (HTTP {status}); set HF_TOKEN, or run `hf auth login`, and accept the conditions on its page"
            f"{f' ({self.withheld})' if self.withheld else ''}"
        )


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set, now or when the library was imported."""
    return constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def find_reason_to_withhold(endpoint: str) -> str:
    """Return why no token may be sent to an endpoint, or an empty string."""
    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return "HF_HUB_DISABLE_IMPLICIT_TOKEN is set"
    parts = urlsplit(endpoint)
    if parts.scheme == "https":
        return ""  # a proxy sees only the encrypted connection
    if parts.hostname not in _LOOPBACK:
        return "no token is sent unencrypted: HF_ENDPOINT must be https"
    proxies = urllib.request.getproxies()
    direct = {host.strip().lower() for host in proxies.get("no", "").split(",")}
    if ("http" in proxies or "all" in proxies) and not direct & {"*", parts.hostname}:
        return f"no token is sent to a proxy: set NO_PROXY={parts.hostname}"
    return ""


def choose_library_token() -> Literal[False] | None:
    """Return the token argument of other libraries: False for none, None for the one that they find."""
    return False if find_reason_to_withhold(constants.ENDPOINT) else None


@contextmanager
def _translate_errors(hub: HubClient, what: str) -> Iterator[None]:
    """Turn errors of the library into a `DataError` or, where they may pass, a `_PassingError`."""
    clients = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    libraries = [error for client in clients for error in (client.HTTPError, client.InvalidURL)]
    try:
        yield
    except errors.HfHubHTTPError as exc:
        asked, home, status = urlsplit(str(exc.response.url)), urlsplit(hub.endpoint), exc.response.status_code
        at_home = (asked.scheme, asked.netloc) == (home.scheme, home.netloc)
        # The signed address of a CDN grows old; the next try gets a new one from the hub.
        if status in _PASSING_STATUSES or (not at_home and status in (401, 403)):
            raise _PassingError(f"HTTP {status}") from None
        raise DataError(f"{what}: {hub.explain_refusal(what, status)}") from None
    except (OSError, *libraries) as exc:
        inner: BaseException | None = exc
        while inner is not None and not getattr(inner, "strerror", None):
            inner = inner.__cause__ or inner.__context__
        raise _PassingError(getattr(inner, "strerror", None) or type(exc).__name__) from None


class _BoundedAnswer(io.BytesIO):
    """Answer in memory."""

    def __init__(self, max_bytes: int, what: str) -> None:
        super().__init__()
        self.max_bytes, self.what = max_bytes, what

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self.max_bytes:
            raise DataError(f"{self.what}: more than the {self.max_bytes} bytes that such a file may have")
        return super().write(data)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    if are_progress_bars_disabled(_PROGRESS_BAR):
        yield
        return
    disable_progress_bars(_PROGRESS_BAR)
    try:
        yield
    finally:
        enable_progress_bars(_PROGRESS_BAR)
