"""Versions of our packages on a package index: one request to its simple API per package.

Requests JSON (PEP 691) and also reads HTML (PEP 503). A package unknown to the index has no versions. Yanked files do
not count: pip installs them only if they are pinned.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from html.parser import HTMLParser

from members import ToolError
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
TIMEOUT_S = 30


def published_versions(name: str, *, index: str | None) -> list[Version]:
    """Return the published versions of a package, oldest first; none without an index.

    Raises:
        ToolError: the index does not answer, or not with a list of files.
    """
    if index is None:
        return []
    url = f"{index.rstrip('/')}/{name}/"
    if not url.startswith(("https://", "http://")):
        raise ToolError(f"index = {index}: not a URL; give a simple index, https://...")
    try:
        request = urllib.request.Request(url, headers={"Accept": ACCEPT})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # https or http, checked above
            kind, body = answer.headers.get_content_type(), answer.read().decode("utf-8")
    except urllib.error.HTTPError as exc:
        if exc.code == 404:
            return []
        raise ToolError(f"{url}: {exc.code} {exc.reason}") from exc
    except OSError as exc:
        raise ToolError(f"{url}: {exc}") from exc
    if kind.endswith("+json"):
        files = [str(f["filename"]) for f in json.loads(body)["files"] if not f.get("yanked")]
    elif kind == "text/html":
        page = _LinkParser()
        page.feed(body)
        files = page.files
    else:
        raise ToolError(f"{url}: returned {kind}, not a list of files")
    return sorted({version for file in files if (version := _parse_version(file)) is not None})


class _LinkParser(HTMLParser):
    """File names of a PEP 503 page, without yanked ones."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and "data-yanked" not in given:
            self.files.append((given.get("href") or "").partition("#")[0].rpartition("/")[2])


def _parse_version(file: str) -> Version | None:
    try:
        return parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None  # a signature or metadata beside the file
