"""Requests to a Hugging Face hub: who is told the token, which redirects are followed, what a refusal means.

The token goes to the endpoint's own origin (scheme, host, port) and nowhere else: a redirect to a CDN is followed
without it, one to an unencrypted address or to anything but http(s) is refused, and it is sent unencrypted to this
machine only. It stands in no message; nor do the queries of URLs, which may be signed. A failure that may pass is a
`PassingError`, which the callers try again; every other one is a `CheckpointError`.

The standard library does it: a redirect must be looked at before it is followed, and nothing else is needed.
"""

import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, TypeVar
from urllib.parse import SplitResult, urljoin, urlsplit

from lt_ckpt import strict_json
from lt_ckpt.errors import CheckpointError, translate_os_errors

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 30.0
MAX_REDIRECTS = 8
MAX_PAUSE_S = 120.0
MAX_ANSWER_BYTES = 2**26
_TOKEN = re.compile(r"[!-~]+")
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_YES = ("1", "ON", "YES", "TRUE")


T = TypeVar("T")


class PassingError(Exception):
    """A failure that may pass: a reset, a timeout, a busy server.

    Attributes:
        wait_s: How long the server asks to wait, else 0.
        gained: Whether something was won all the same, so that the try does not count as one in vain.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.gained = False


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token and where it was found; its text is in no `repr`."""

    text: str = field(repr=False)
    origin: str

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> "Token | None":
        """Looks where Hugging Face's own tools look: HF_TOKEN, then the file that `hf auth login` writes.

        Raises:
            CheckpointError: What is there cannot be a token, or cannot be read.
        """
        if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _YES:
            return None
        origin, text = "HF_TOKEN", environ.get("HF_TOKEN", "").strip()
        if not text:
            cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
            home = environ.get("HF_HOME") or f"{cache}/huggingface"
            path = Path(environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
            origin = str(path)
            with translate_os_errors("reading the token", path):
                try:
                    text = path.read_bytes().decode("ascii", "replace").strip()
                except FileNotFoundError:
                    return None
        if not text:
            return None
        if not _TOKEN.fullmatch(text):
            raise CheckpointError(f"{origin}: what is there cannot be a token: it holds blanks or other characters")
        return cls(text=text, origin=origin)


class Readable(Protocol):
    """The body of an answer."""

    def read(self, amount: int, /) -> bytes:
        """Returns at most so many bytes, none at the end."""
        ...

    def close(self) -> None:
        """Gives the connection back."""
        ...


@dataclass(kw_only=True)
class Answer:
    """An answer after all redirects; a context that closes the connection.

    Attributes:
        status: 200, 206 or 416 (the range that was asked for is not there).
        headers: Of the last answer.
        etag: The ETag of the content, without quotes: the hub's own word on it (X-Linked-Etag) where it gives
            one, else the last answer's ETag; empty when there is none.
        linked: Whether it is the hub's own word.
        weak: Whether that ETag is a weak one, which does not promise equal bytes.
        linked_bytes: Size of the content by the hub's own word, or None.
        body: What is left to read.
    """

    status: int
    headers: Message
    etag: str
    linked: bool
    weak: bool
    linked_bytes: int | None
    body: Readable

    def __enter__(self) -> "Answer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.body.close()

    def read(self, amount: int) -> bytes:
        """Returns at most so many bytes, none at the end.

        Raises:
            PassingError: The connection broke.
        """
        try:
            return self.body.read(amount)
        except (OSError, http.client.HTTPException) as exc:
            raise PassingError(f"the connection broke ({_reason(exc)})") from None

    def number(self, header: str) -> int | None:
        """Returns a header that holds a number, or None."""
        return _number(self.headers.get(header))


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 20 else None


def _reason(exc: BaseException) -> str:
    """Returns what went wrong, without anything that the other side sent."""
    if isinstance(exc, urllib.error.URLError) and isinstance(exc.reason, BaseException):
        exc = exc.reason
    return (exc.strerror if isinstance(exc, OSError) and exc.strerror else "") or type(exc).__name__


def _origin(parts: SplitResult) -> tuple[str, str, int]:
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


def _split(url: str, said_by: str) -> SplitResult:
    """Splits a URL that a request may be sent to."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, good = None, False
    if parts is None or not good or re.search(r"[^!-~]", url):
        raise CheckpointError(f"{said_by}: not an address that can be asked: only http and https are")
    return parts


class Hub:
    """A hub and what is needed to ask it.

    Attributes:
        endpoint: Its address, without a slash at the end.
        token: Sent to it and to no one else.
        tries: How often something is tried that may pass, without any progress.
        pause_s: Seconds before the second try; doubled before each further one.
    """

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        tries: int = 6,
        pause_s: float = 1.0,
    ) -> None:
        values = os.environ if environ is None else environ
        said_by = "endpoint" if endpoint else "HF_ENDPOINT"
        self.endpoint = (endpoint or values.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        parts = _split(self.endpoint, said_by)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise CheckpointError(f"{said_by}: must be a plain address such as {DEFAULT_ENDPOINT}, without credentials")
        self._home = _origin(parts)
        self.token = Token.find(values)
        self.offline = values.get("HF_HUB_OFFLINE", "").upper() in _YES
        self.tries, self.pause_s = tries, pause_s
        self._through = urllib.request.build_opener(_Stay())
        self._direct = urllib.request.build_opener(_Stay(), urllib.request.ProxyHandler({}))

    @property
    def sends_token(self) -> bool:
        """Whether there is a token and the way to the endpoint is such that it may be sent."""
        scheme, host, _ = self._home
        return self.token is not None and (scheme == "https" or host in _LOOPBACK)

    def get(self, path: str, repo: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Asks for a path of the endpoint, and follows redirects.

        Args:
            path: With a leading slash, quoted.
            repo: The repository, for messages.
            headers: Further headers.

        Raises:
            PassingError: Try again.
            CheckpointError: There is no use in trying again.
        """
        if self.offline:
            raise CheckpointError(f"hf://{repo}: HF_HUB_OFFLINE is set, and the hub has to be asked for this")
        url = self.endpoint + path
        linked: Message | None = None
        for _ in range(MAX_REDIRECTS):
            parts = _split(url, f"hf://{repo}: where the hub leads")
            if self._home[0] == "https" and parts.scheme != "https":
                raise CheckpointError(f"hf://{repo}: the hub leads to {parts.hostname} unencrypted: not followed")
            status, answer_headers, body = self._ask(url, parts, headers or {})
            at_home = _origin(parts) == self._home
            if at_home and linked is None and answer_headers.get("X-Linked-Etag"):
                linked = answer_headers
            if status in (200, 206, 416):
                said = linked or answer_headers
                etag = said.get("X-Linked-Etag") or said.get("ETag") or ""
                return Answer(
                    status=status,
                    headers=answer_headers,
                    etag=etag.removeprefix("W/").strip('"'),
                    linked=linked is not None,
                    weak=etag.startswith("W/"),
                    linked_bytes=_number(said.get("X-Linked-Size")),
                    body=body,
                )
            body.close()
            if status in _REDIRECTS and answer_headers.get("Location"):
                url = urljoin(url, answer_headers["Location"])
                continue
            # The signed address of a CDN grows old; the next try gets a new one from the hub.
            if status in _PASSING or (not at_home and status in (401, 403)):
                wait_s = float(_number(answer_headers.get("Retry-After")) or 0)
                raise PassingError(f"{parts.hostname} answered {status}", wait_s)
            raise self._refusal(repo, status, answer_headers, str(parts.hostname), at_home=at_home)
        raise CheckpointError(f"hf://{repo}: the hub leads through more than {MAX_REDIRECTS} addresses: not followed")

    def _ask(self, url: str, parts: SplitResult, headers: Mapping[str, str]) -> tuple[int, Message, Readable]:
        request = urllib.request.Request(url, headers={"User-Agent": "lt-ckpt", **headers})
        if self.token is not None and self.sends_token and _origin(parts) == self._home:
            request.add_unredirected_header("Authorization", f"Bearer {self.token.text}")
        opener = self._direct if parts.hostname in _LOOPBACK else self._through
        try:
            answer: http.client.HTTPResponse = opener.open(request, timeout=TIMEOUT_S)
            return answer.status, answer.headers, answer
        except urllib.error.HTTPError as exc:
            return exc.code, exc.headers, exc
        except (OSError, http.client.HTTPException) as exc:
            inner = exc.reason if isinstance(exc, urllib.error.URLError) else exc
            if isinstance(inner, ssl.SSLCertVerificationError):
                raise CheckpointError(
                    f"{parts.hostname}: its certificate is not trusted ({inner.verify_message}); behind a company's "
                    "proxy set SSL_CERT_FILE to its certificates"
                ) from None
            raise PassingError(f"{parts.hostname} cannot be reached ({_reason(exc)})") from None

    def _refusal(self, repo: str, status: int, headers: Message, host: str, *, at_home: bool) -> CheckpointError:
        """Makes the error for an answer that says no."""
        page = f"{self.endpoint}/{repo}"
        where = f"hf://{repo}"
        code = headers.get("X-Error-Code", "")
        said = _quoted(headers.get("X-Error-Message", "").replace(self.token.text if self.token else "\0", "..."))
        token = self.token if self.sends_token else None
        how = self._how_to_give_a_token()
        if not at_home:
            return CheckpointError(f"{where}: {host} answered {status}; try again later")
        if status == 401 and "Invalid credentials" in said:
            origin = token.origin if token else "the request"
            return CheckpointError(f"{where}: the hub does not know the token in {origin}; make a new one: {how}")
        if code == "GatedRepo":
            if token is None:
                return CheckpointError(
                    f"{where}: this model is gated and no token was sent; open {page}, log in, accept its conditions, "
                    f"then {how}"
                )
            return CheckpointError(
                f"{where}: this model is gated, and the account of the token in {token.origin} has no access; open "
                f"{page} with that account and accept its conditions (some models wait for their owner's approval); "
                "a fine-grained token needs the permission to read public gated repositories"
            )
        if code == "RevisionNotFound":
            return CheckpointError(f"{where}: the repository has no such revision; those that it has: {page}")
        if code == "EntryNotFound":
            return CheckpointError(f"{where}: a file that the hub lists is not there; see {page}")
        if code == "RepoNotFound" or status in (401, 404):
            who = f"the account of the token in {token.origin} may not see it" if token else "it needs a token"
            return CheckpointError(
                f"{where}: there is no such model at {self.endpoint}, or it is private or gated and {who}; check the "
                f"spelling, or {how}"
            )
        if status == 403:
            who = f"the token in {token.origin}" if token else "a request without token"
            return CheckpointError(f"{where}: the hub forbids it to {who}{said}; see {page}")
        return CheckpointError(f"{where}: the hub answered {status}{said}")

    def _how_to_give_a_token(self) -> str:
        if self.token is not None and not self.sends_token:
            return f"use an https address in HF_ENDPOINT: the token in {self.token.origin} is not sent unencrypted"
        return f"set HF_TOKEN to a token from {self.endpoint}/settings/tokens, or run `hf auth login`"

    def insist(self, what: str, attempt: Callable[[], T]) -> T:
        """Calls `attempt` until it returns.

        Args:
            what: What is attempted, for messages.
            attempt: Raises `PassingError` to be called again.

        Raises:
            CheckpointError: `tries` calls in a row brought nothing.
        """
        in_vain = 0
        while True:
            try:
                return attempt()
            except PassingError as exc:
                in_vain = 0 if exc.gained else in_vain + 1
                if in_vain >= self.tries:
                    raise CheckpointError(
                        f"{what}: {exc}; given up after {in_vain} tries; check the network (HTTPS_PROXY, HF_ENDPOINT) "
                        "and call again: what is here already is not fetched twice"
                    ) from None
                time.sleep(min(max(self.pause_s * 2 ** max(in_vain - 1, 0), exc.wait_s), MAX_PAUSE_S))

    def json(self, path: str, repo: str) -> dict[str, Any]:
        """Asks for a JSON object.

        Raises:
            PassingError: Try again.
            CheckpointError: There is no use in trying again.
        """
        with self.get(path, repo) as answer:
            raw = b""
            while block := answer.read(2**20):
                raw += block
                if len(raw) > MAX_ANSWER_BYTES:
                    raise CheckpointError(f"{self.endpoint}: an answer of more than {MAX_ANSWER_BYTES} bytes: no hub")
            expected = answer.number("Content-Length")
        if expected is not None and len(raw) != expected:
            raise PassingError("the answer was cut off")
        try:
            return strict_json.loads(raw, self.endpoint)
        except CheckpointError as exc:
            raise CheckpointError(f"{self.endpoint}: does not answer as a hub does; check HF_ENDPOINT") from exc


def _quoted(text: str) -> str:
    """Returns what a server says as one short harmless line."""
    plain = "".join(char for char in text if char.isascii() and char.isprintable())[:200]
    return f" ({plain!r})" if plain else ""
