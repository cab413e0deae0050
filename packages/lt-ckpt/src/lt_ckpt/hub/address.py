"""Addresses of models on a hub, and the sentences of what a hub or the way to it refuses.

huggingface_hub asks, retries and takes token, endpoint and offline mode where Hugging Face's tools do (HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE). It is imported when it is needed (`lt-ckpt[hub]`); its errors may quote signed URLs, so
that only the kind of an error and the hub's own sentence are repeated.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from urllib.parse import unquote

from lt_ckpt.errors import CheckpointError, storage_error

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}"
_ADDRESS = re.compile(rf"hf://({_NAME}/{_NAME})(?:@((?:refs/(?:pr|convert)/)?[^/@\x00-\x20]+))?((?:/{_NAME})*)")
_SENTENCES = {
    "GatedRepoError": "the model is gated: open its page, log in and accept its conditions, then {login}; a "
    "fine-grained token needs the permission to read gated repositories",
    "RevisionNotFoundError": "the repository has no such branch, tag or commit",
    "RepositoryNotFoundError": "there is no such model, or it is private: check its name, or {login}",
    "LocalEntryNotFoundError": "is not in the cache {cache}, and the hub does not answer or HF_HUB_OFFLINE is set",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and this takes the hub: unset it",
}
LOGIN = "set HF_TOKEN or run `hf auth login` with an account that has access"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Model on a hub, as an hf:// address names it.

    Attributes:
        repo: `org/name`.
        revision: A branch, a tag or a commit.
        subfolder: A folder in the repository, or empty.
    """

    repo: str
    revision: str = "main"
    subfolder: str = ""

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Read `hf://org/name[@revision][/folder]`; a revision with a slash is written with %2F, or is refs/pr/1.

        Raises:
            CheckpointError: It has another form.
        """
        found = _ADDRESS.fullmatch(url)
        if found is None or ".." in found[1] or "--" in found[1] or re.search(r"[\x00-\x20]", unquote(found[2] or "")):
            form = "hf://org/name, hf://org/name@revision or hf://org/name@revision/folder"
            raise CheckpointError(f"{url}: must be {form}")
        return cls(repo=found[1], revision=unquote(found[2] or "main"), subfolder=found[3].removeprefix("/"))

    def __str__(self) -> str:
        return f"hf://{self.repo}@{self.revision}" + (f"/{self.subfolder}" if self.subfolder else "")


def import_library(address: Address) -> ModuleType:
    """Return huggingface_hub; raise a CheckpointError that names the extra where it is not installed."""
    try:
        import_module("huggingface_hub.errors")
        return import_module("huggingface_hub")
    except ModuleNotFoundError as exc:
        if not (exc.name or "").startswith("huggingface_hub"):
            raise
        raise CheckpointError(f"{address}: huggingface_hub is not installed: pip install 'lt-ckpt[hub]'") from None


@contextmanager
def asking(address: Address) -> Iterator[None]:
    """Turn what the library raises in the block into a `CheckpointError` of one line; its bars are for a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hub = import_library(address)
    clients = tuple(sys.modules[name].HTTPError for name in ("httpx", "httpx2") if name in sys.modules)
    known = (hub.errors.HfHubHTTPError, hub.errors.EntryNotFoundError, ConnectionError, *clients)
    if is_quiet := not (sys.stderr.isatty() or are_progress_bars_disabled()):
        disable_progress_bars()
    try:
        yield
    except known as exc:
        raise CheckpointError(f"{address}: {_describe(exc, hub)}") from None
    except RuntimeError as exc:  # of a thread that sends a file
        if (cause := exc.__cause__) is None or not isinstance(cause, known):
            raise
        raise CheckpointError(f"{address}: {_describe(cause, hub)}") from None
    except ValueError as exc:  # such as front matter of a README.md that is none
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"{address}: {str(exc).splitlines()[0]}") from exc
    except OSError as exc:
        raise storage_error(exc, "keeping files of the hub", hub.constants.HF_HUB_CACHE) from exc
    finally:
        if is_quiet:
            enable_progress_bars()


def _describe(exc: BaseException, hub: ModuleType) -> str:
    cause = exc.__cause__
    if cause is not None and isinstance(exc, FileNotFoundError) and isinstance(cause, hub.errors.HfHubHTTPError):
        return _describe(cause, hub)  # why it had to be in the cache
    for kind in type(exc).__mro__:
        if kind.__name__ in _SENTENCES:
            return _SENTENCES[kind.__name__].format(login=LOGIN, cache=hub.constants.HF_HUB_CACHE)
    response = getattr(exc, "response", None)
    if response is None:
        return f"the hub cannot be reached ({type(exc).__name__}); check the network, HTTPS_PROXY and HF_ENDPOINT"
    said = " ".join(str(getattr(exc, "server_message", None) or "").split())[:300]
    login = f": {LOGIN}" if response.status_code == 401 else ""
    return f"the hub answered {response.status_code}{f' ({said})' if said else ''}{login}"
