"""Small files of a model on a Hugging Face hub, by plain https: which commit a name means, and the files' content.

The hub is HF_ENDPOINT, else huggingface.co. The token is looked for where Hugging Face's tools do (HF_TOKEN, then the
file that `hf auth login` writes); it is sent to the hub alone, never to where a redirect leads, and unencrypted only to
this machine. What arrives is compared with the size and the hash that the hub states. With HF_HUB_OFFLINE set, the
files are taken from Hugging Face's own cache. The standard library is enough for this.
"""

import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from lt_data.errors import DataError
from lt_data.storage import translate_os_errors

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ADDRESS = re.compile(rf"(?P<repo>{_NAME}(/{_NAME})?)(@(?P<revision>[^@\s]+))?")
_SHORT = re.compile(rf"{_NAME}/{_NAME}(@[^@\s/]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 30.0
_TRIES = 4
_PASSING = (408, 429, 500, 502, 503, 504)
_YES = ("1", "ON", "YES", "TRUE")


def is_short_address(text: str) -> bool:
    """Whether a text has the form `org/name` or `org/name@revision`."""
    return _SHORT.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model repository at one revision.

    Attributes:
        repo: `org/name`, or the bare name of an old repository.
        revision: branch, tag or commit.
    """

    repo: str
    revision: str = "main"

    @classmethod
    def parse(cls, address: str) -> "HubModel":
        """Read `org/name[@revision]`, with or without `hf://` before it.

        Raises:
            DataError: it has another form.
        """
        found = _ADDRESS.fullmatch(address.removeprefix("hf://"))
        if found is None:
            raise DataError(
                f"{address}: not the name of a model on a hub; write hf://org/name or hf://org/name@revision"
            )
        return cls(repo=found["repo"], revision=found["revision"] or "main")

    def fetch(
        self,
        names: Iterable[str],
        *,
        environ: Mapping[str, str] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> tuple[str, dict[str, bytes]]:
        """The commit and, of the files named, those that are there.

        Args:
            names: of files at the top of the repository.
            environ: instead of `os.environ`.
            pause: waits some seconds between tries.

        Raises:
            DataError: no such model or revision, no access, no network, or another content than the hub stated.
        """
        values = os.environ if environ is None else environ
        if values.get("HF_HUB_OFFLINE", "").upper() in _YES:
            return self._from_cache(names, values)
        endpoint = (values.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise DataError(f"HF_ENDPOINT={endpoint!r}: not an http(s) address")
        token = _token(values, endpoint)

        def get(path: str) -> bytes:
            return _get(f"{endpoint}/{path}", token, f"hf://{self.repo}@{self.revision}", pause)

        answer = get(f"api/models/{self.repo}/revision/{quote(self.revision, safe='')}?blobs=true")
        try:
            info: dict[str, Any] = json.loads(answer)
            commit: str = info["sha"]
            there = {file["rfilename"]: file for file in info["siblings"]}
        except (ValueError, KeyError, TypeError) as exc:
            raise DataError(f"{endpoint}: does not answer as a hub does ({exc}); check HF_ENDPOINT") from exc
        files: dict[str, bytes] = {}
        for name in names:
            if name in there:
                files[name] = get(f"{self.repo}/resolve/{commit}/{quote(name)}")
                _check(files[name], there[name], f"hf://{self.repo}@{commit}: {name}")
        return commit, files

    def _from_cache(self, names: Iterable[str], values: Mapping[str, str]) -> tuple[str, dict[str, bytes]]:
        home = values.get("HF_HOME") or f"{values.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        cache = Path(values.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
        folder = cache / f"models--{self.repo.replace('/', '--')}"
        with translate_os_errors("read", folder):
            ref = folder / "refs" / self.revision
            commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else self.revision
            snapshot = folder / "snapshots" / commit
            if not snapshot.is_dir():
                raise DataError(
                    f"hf://{self.repo}@{self.revision}: not in {cache}, and HF_HUB_OFFLINE is set; unset it, or load "
                    "the model once while there is a network"
                )
            return commit, {name: (snapshot / name).read_bytes() for name in names if (snapshot / name).is_file()}


def _token(values: Mapping[str, str], endpoint: str) -> str | None:
    where = urlsplit(endpoint)
    if where.scheme != "https" and where.hostname not in ("localhost", "127.0.0.1", "::1"):
        return None
    if values.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _YES:
        return None
    text = (values.get("HF_TOKEN") or values.get("HUGGING_FACE_HUB_TOKEN") or "").strip()
    if not text:
        home = values.get("HF_HOME") or f"{values.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        path = Path(values.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
        with translate_os_errors("read the token in", path):
            text = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    if text and not re.fullmatch(r"[!-~]+", text):
        raise DataError("HF_TOKEN (or the token file): what is there cannot be a token")
    return text or None


def _get(url: str, token: str | None, what: str, pause: Callable[[float], None]) -> bytes:
    reason = ""
    for number in range(_TRIES):
        if number:
            pause(2.0**number)
        request = urllib.request.Request(url)
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return answer.read()
        except urllib.error.HTTPError as exc:
            exc.close()
            if exc.code not in _PASSING:
                raise DataError(f"{what}: {_refusal(exc.code, token)}") from exc
            reason = f"HTTP {exc.code}"
        except (OSError, http.client.HTTPException) as exc:
            reason = str(exc) or type(exc).__name__
    endpoint = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    raise DataError(
        f"{what}: {endpoint} does not answer ({reason}); given up after {_TRIES} tries: check the network and "
        "HF_ENDPOINT, or name a folder that holds the tokenizer"
    )


def _refusal(code: int, token: str | None) -> str:
    if code in (401, 403):
        who = (
            "the token given has no access to it"
            if token
            else "it is private, gated, or not there, and no token was sent"
        )
        return (
            f"{who} (HTTP {code}); set HF_TOKEN, or run `hf auth login`, and accept the model's conditions on its page"
        )
    if code == 404:
        return "there is no such model or revision on the hub, nor a folder of that name here (HTTP 404)"
    return f"the hub refuses (HTTP {code})"


def _check(content: bytes, stated: Mapping[str, Any], what: str) -> None:
    large = stated.get("lfs") or {}
    if (size := large.get("size", stated.get("size"))) is not None and size != len(content):
        raise DataError(f"{what}: {len(content)} bytes arrived of {size}; try again")
    if (sha256 := large.get("sha256")) is not None:
        same = hashlib.sha256(content).hexdigest() == sha256
    elif (blob := stated.get("blobId")) is not None and _COMMIT.fullmatch(blob):
        same = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == blob
    else:
        same = True
    if not same:
        raise DataError(f"{what}: what arrived is not what the hub has; try again")
