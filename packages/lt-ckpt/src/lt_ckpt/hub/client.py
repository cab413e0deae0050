"""Requests to a Hugging Face hub by huggingface_hub, which only this module and `upload` import.

The library asks, follows redirects and goes on after a broken connection. Kept around it:

- The token goes to the endpoint of HF_ENDPOINT alone: over https, or unencrypted to this machine with no proxy between.
  Of a redirect to another scheme, host or port the library drops it.
- A download is appended to `NAME.part` and gets its name once it has the size and the hash of the hub's list, so that a
  later process goes on where one was killed, and no byte is given out unseen.
- hf-xet is not used: its requests, with tokens and proxies of their own, can be held to none of this.
- Messages quote no URL after a redirect, which may be signed, and no token.
- `insist` retries, and one error says that it was in vain; the library's own retries and their lines are off.

Cost: one request per file and break of the line; each byte is written once and read once more for its hash.
"""

import errno
import io
import logging
import os
import re
import ssl
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants, errors, get_token
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from lt_ckpt import files, strict_json
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.hub.listing import HubFile

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_ANSWER_BYTES = 2**26
TRIES = 5
PAUSE_S = 1.0
_ENDPOINT = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?(/[a-z0-9._~%/-]*)?", re.IGNORECASE)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_LOCAL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
_TOKEN_ERRORS = tuple(getattr(errors, name) for name in ("OIDCError", "DeviceCodeError") if hasattr(errors, name))
_PROGRESS_BAR = "huggingface_hub.http_get"

T = TypeVar("T")


class PassingError(Exception):
    """Failure that may pass: a reset, a timeout, a busy server.

    Attributes:
        begin_anew: Whether the server cannot go on where it was asked to.
    """

    def __init__(self, reason: str, *, begin_anew: bool = False) -> None:
        super().__init__(reason)
        self.begin_anew = begin_anew


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Hub of HF_ENDPOINT.

    Attributes:
        endpoint: Address, without a slash at the end.
        token: Sent to it and to no one else; None if there is none or it must not be sent.
        withheld: Reason why no token is sent, or empty.
    """

    endpoint: str
    token: str | None = field(repr=False)
    withheld: str

    @classmethod
    def from_environment(cls) -> "Hub":
        """Read HF_ENDPOINT, and look for a token where Hugging Face's tools do.

        Raises:
            CheckpointError: The endpoint is not a plain http(s) address, or what is found cannot be a token.
        """
        endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        if not _ENDPOINT.fullmatch(endpoint):
            raise CheckpointError(
                f"HF_ENDPOINT: must be a plain http(s) address such as {DEFAULT_ENDPOINT}, without credentials"
            )
        withheld = find_reason_to_withhold(endpoint)
        try:
            token = None if withheld else get_token()
        except (OSError, *_TOKEN_ERRORS) as exc:
            raise CheckpointError(
                f"HF_TOKEN, {constants.HF_TOKEN_PATH} or HF_OIDC_RESOURCE: no token can be had ({type(exc).__name__})"
            ) from exc
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise CheckpointError(
                "HF_TOKEN (or the token file): holds blanks or other characters, so it cannot be a token"
            )
        return cls(endpoint=endpoint, token=token, withheld=withheld)

    def read_json(self, path: str, repo: str) -> dict[str, Any]:
        """Return the JSON object at a path of the endpoint.

        Args:
            path: With a leading slash, quoted.
            repo: The repository, for messages.

        Raises:
            CheckpointError: The hub refuses, does not answer, or answers something else.
        """

        def attempt() -> bytes:
            answer = _BoundedAnswer()
            self._get(path, repo, answer)
            return answer.getvalue()

        raw = insist(f"hf://{repo}", attempt, lambda: 0)
        try:
            return strict_json.loads(raw, self.endpoint)
        except CheckpointError as exc:
            raise CheckpointError(f"{self.endpoint}: does not answer as a hub does; check HF_ENDPOINT") from exc

    def download(self, path: str, repo: str, file: HubFile, target: Path, on_bytes: Callable[[int], None]) -> None:
        """Download a file; the caller holds the lock of the folder.

        Args:
            path: As for `read_json`.
            repo: As for `read_json`.
            file: Size and hash.
            target: File to make. Its folder is there, it is not.
            on_bytes: Called with each number of bytes that came in; negative if they had to be thrown away.

        Raises:
            CheckpointError: As for `read_json`, the bytes are not those listed, or the disk fails.
        """
        part = target.with_name(f"{target.name}.part")
        where = f"hf://{repo}: {file.name}"
        spoilt = 0

        def attempt() -> None:
            nonlocal spoilt
            try:
                if sink.size < file.n_bytes:
                    self._get(path, repo, sink, resume_size=sink.size, expected_size=file.n_bytes)
            except PassingError as exc:
                if exc.begin_anew:
                    sink.restart()
                raise PassingError(f"{exc}; {sink.size} of {file.n_bytes} bytes are here") from None
            sink.flush()
            found = file.hash_file(part)
            if found == file.digest:
                return
            sink.restart()
            spoilt += 1
            if spoilt > 1:
                raise CheckpointError(
                    f"{where}: came twice with other bytes than the hub lists (hash {found}, not {file.digest}); a "
                    "proxy on the way is broken, or the file: try again later or by another way"
                )
            raise PassingError("the bytes that came are not those that the hub lists")

        with translate_os_errors("downloading", target), _PartialFile(part, file.n_bytes, on_bytes) as sink:
            insist(where, attempt, lambda: sink.most)
            files.fsync(sink.fileno())
            files.rename(part, target)
            files.fsync_folder(target.parent)

    def _get(
        self, path: str, repo: str, sink: io.IOBase, *, resume_size: int = 0, expected_size: int | None = None
    ) -> None:
        headers = {"Accept-Encoding": "identity", "User-Agent": "lt-ckpt"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        url = self.endpoint + path
        options: dict[str, Any] = {"headers": headers, "expected_size": expected_size}
        with translate_errors(self, repo), _quiet():
            http_get(url, sink, resume_size=resume_size, _nb_retries=0, **options)  # type: ignore[arg-type]

    def refusal(self, repo: str, exc: errors.HfHubHTTPError) -> CheckpointError:
        """Make the error for an answer that says no."""
        page, status, sent = f"{self.endpoint}/{repo}", exc.response.status_code, self.token is not None
        said = _quote_answer(exc.response.headers.get("X-Error-Message", "").replace(self.token or "\0", "..."))
        how = f"set HF_TOKEN, or run `hf auth login`{f' ({self.withheld})' if self.withheld else ''}"
        if sent and status == 401 and "Invalid credentials" in said:
            text = f"the hub does not know the token given; make a new one, and {how}"
        elif isinstance(exc, errors.GatedRepoError) and sent:
            text = (
                f"this model is gated, and the account of the token given has no access; open {page} with that account "
                "and accept its conditions (some models wait for their owner's approval); a fine-grained token needs "
                "the permission to read public gated repositories"
            )
        elif isinstance(exc, errors.GatedRepoError):
            text = f"this model is gated and no token was sent; open {page}, log in, accept its conditions, then {how}"
        elif isinstance(exc, errors.RevisionNotFoundError):
            text = f"the repository has no such revision; those that it has: {page}"
        elif isinstance(exc, errors.EntryNotFoundError):
            text = f"a file that the hub lists is not there; see {page}"
        elif isinstance(exc, errors.RepositoryNotFoundError) or status in (401, 404):
            who = "the account of the token given may not see it" if sent else "it needs a token"
            text = f"no such model at {self.endpoint}, or it is private or gated and {who}; check its name, or {how}"
        else:
            text = f"the hub answered {status} to {'the token given' if sent else 'a request without token'}{said}"
        return CheckpointError(f"hf://{repo}: {text}")


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


def insist(what: str, attempt: Callable[[], T], count_bytes: Callable[[], int]) -> T:
    """Call `attempt` until it returns; tries in a row that bring no bytes are counted."""
    in_vain, most = 0, count_bytes()
    while True:
        try:
            return attempt()
        except PassingError as exc:
            in_vain = 0 if count_bytes() > most else in_vain + 1
            most = count_bytes()
            if in_vain >= TRIES:
                raise CheckpointError(
                    f"{what}: {exc}; given up after {in_vain} tries; check the network (HTTPS_PROXY, HF_ENDPOINT) and "
                    "call again: what is here already is not fetched twice"
                ) from None
            time.sleep(PAUSE_S * 2**in_vain)


@contextmanager
def translate_errors(hub: Hub, repo: str) -> Iterator[None]:
    """Turn errors of the library into a `CheckpointError` or, where they may pass, a `PassingError`."""
    clients = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    libraries = [error for client in clients for error in (client.HTTPError, client.InvalidURL)]
    try:
        yield
    except errors.HfHubHTTPError as exc:
        asked, home, status = urlsplit(str(exc.response.url)), urlsplit(hub.endpoint), exc.response.status_code
        at_home = (asked.scheme, asked.netloc) == (home.scheme, home.netloc)
        # The signed address of a CDN grows old; the next try gets a new one from the hub.
        if status in (*_PASSING_STATUSES, 416) or (not at_home and status in (401, 403)):
            raise PassingError(f"{asked.hostname} answered {status}", begin_anew=status == 416) from None
        if not at_home:
            raise CheckpointError(f"hf://{repo}: {asked.hostname} answered {status}; try again later") from None
        raise hub.refusal(repo, exc) from None
    except (OSError, *libraries) as exc:
        if isinstance(exc, OSError) and exc.errno in _LOCAL_ERRNOS:
            raise
        reason = _find_reason(exc)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise CheckpointError(
                f"hf://{repo}: a certificate on the way is not trusted ({reason.verify_message}); behind a company's "
                "proxy set SSL_CERT_FILE to its certificates"
            ) from None
        text = (reason.strerror if isinstance(reason, OSError) else None) or type(reason).__name__
        raise PassingError(f"the answer broke off or did not come ({text})") from None


def _find_reason(exc: BaseException) -> BaseException:
    """Return the system's error behind an exception, else the exception."""
    inner: BaseException | None = exc
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner
        inner = inner.__cause__ or inner.__context__
    return exc


class _BoundedAnswer(io.BytesIO):
    """Answer in memory."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > MAX_ANSWER_BYTES:
            raise CheckpointError(f"an answer of more than {MAX_ANSWER_BYTES} bytes: HF_ENDPOINT leads to no hub")
        return super().write(data)


class _PartialFile(io.BufferedWriter):
    """Unfinished file, never longer than listed.

    Attributes:
        size: Bytes in it.
        most: The most bytes that were ever in it.
    """

    def __init__(self, path: Path, limit: int, on_bytes: Callable[[int], None]) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        super().__init__(io.FileIO(descriptor, "r+"))
        self.limit, self.on_bytes = limit, on_bytes
        self.size = self.most = self.seek(0, os.SEEK_END)
        on_bytes(self.size)
        if self.size > limit:
            self.restart()

    def write(self, data: Any, /) -> int:
        if self.size + len(data) > self.limit:
            raise PassingError("more bytes came than the hub lists", begin_anew=True)
        written = super().write(data)
        self._resize(self.size + written)
        return written

    def truncate(self, size: int | None = None, /) -> int:
        """Cut the file; the library does so if the server begins again."""
        result = super().truncate(size)
        self._resize(self.tell())
        return result

    def restart(self) -> None:
        """Throw all bytes away."""
        self.seek(0)
        self.truncate()

    def _resize(self, size: int) -> None:
        self.on_bytes(size - self.size)
        self.size = size
        self.most = max(self.most, size)


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the library's progress bar and its lines about failures, which `insist` retries and reports."""
    logger, was_disabled = logging.getLogger("huggingface_hub"), are_progress_bars_disabled(_PROGRESS_BAR)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    disable_progress_bars(_PROGRESS_BAR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if not was_disabled:
            enable_progress_bars(_PROGRESS_BAR)


def _quote_answer(text: str) -> str:
    """Return a server's words as one short harmless line."""
    plain = "".join(char for char in text if char.isascii() and char.isprintable())[:200]
    return f" ({plain!r})" if plain else ""
