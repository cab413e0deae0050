"""A folder in an S3 bucket: the one module that knows boto3.

Credentials, region and endpoint come from where boto3 looks for them (environment, ~/.aws, the machine's role;
AWS_ENDPOINT_URL_S3 for another store than Amazon's); none of them stands in a message or a file. Files go and come by
boto3's transfer manager: in parts of 16 MiB (larger ones for a file of more than 10,000), several at a time, each tried
again, and an upload that fails is aborted. An object carries the digest of its content as metadata, so that a whole one
is known by one request and never sent again.

Threads share a folder; another process, forked or sent it by pickle, makes a client of its own.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from lt_data.errors import DataError

CONNECTIONS = 16
"""Requests of one client at a time."""
PART_BYTES = 16 * 2**20
_DIGEST = "lt-content"
_BODY_TRIES = 4  # of a body that ends early: boto3 tries again only what fails before it
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/([!-~]+))?")
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the machine a role"
_CHECK = "check the address, the region and what the credentials allow"
_BUSY = ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "500", "503")


class RemoteError(DataError):
    """S3 refuses.

    Attributes:
        code: S3's own word for it, empty where S3 said nothing.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class UnreachableError(RemoteError):
    """S3 cannot be reached or is busy: only the network needs attention, and the same call goes on later."""

    exit_code = 75


@contextmanager
def _translate_boto_errors(action: str, url: str) -> Iterator[None]:
    """Turn boto3's errors into ours; of its text, which may quote a secret, only names of errors are kept."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as known
    from s3transfer.exceptions import RetriesExceededError

    try:
        yield
    except known.ClientError as exc:
        code = str(exc.response.get("Error", {}).get("Code", "unknown"))
        kind, remedy = (UnreachableError, "S3 is busy: try again later") if code in _BUSY else (RemoteError, _CHECK)
        raise kind(f"{url}: {action} failed ({code}): {remedy}", code) from None
    except (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError):
        raise RemoteError(f"{url}: {action} failed: there are no credentials: {_CREDENTIALS}") from None
    except (known.BotoCoreError, Boto3Error, RetriesExceededError) as exc:
        kind = RemoteError if isinstance(exc, known.ProfileNotFound | known.NoRegionError) else UnreachableError
        raise kind(f"{url}: {action} failed: {type(exc).__name__}; check the network and the AWS_ variables") from None


def make_client() -> Any:
    """Make a client of boto3, with a session of its own, so that any thread may make one.

    Raises:
        DataError: boto3 is set up in a way that it does not take.
    """
    from boto3.session import Session
    from botocore.config import Config

    retries: dict[str, Any] = {"mode": "standard", "total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", 5))}
    config = Config(connect_timeout=10, read_timeout=30, retries=retries, max_pool_connections=4 * CONNECTIONS)
    with _translate_boto_errors("making a client", "s3://"):
        try:
            return Session().client("s3", config=config)
        except ValueError:  # quotes the address, which may hold a password
            raise DataError("s3://: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is not an address") from None


class S3Folder:
    """A folder in a bucket; nothing is asked when it is made.

    Args:
        url: `s3://bucket/folder`.

    Attributes:
        url: the address, without a slash at the end.

    Raises:
        DataError: it is no address of a folder in a bucket, or boto3 is missing.
    """

    def __init__(self, url: str) -> None:
        found = _URL.fullmatch(url.rstrip("/"))
        if found is None or (found[2] and {"", ".", ".."} & {*found[2].split("/")}):
            shown = "s3://..." if "@" in url else url  # what comes before it may be a password
            raise DataError(f"{shown}: must be s3://bucket/folder; credentials are boto3's ({_CREDENTIALS})")
        if find_spec("boto3") is None:
            raise DataError('s3://: boto3 is not installed: pip install "lt-data[s3]"')
        self.url = url.rstrip("/")
        self._bucket = found[1]
        self._prefix = f"{found[2]}/" if found[2] else ""
        self._clients: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    @property
    def client(self) -> Any:
        """The client of this process, made at the first use."""
        if os.getpid() not in self._clients:
            self._clients[os.getpid()] = make_client()
        return self._clients[os.getpid()]

    def subfolder(self, name: str) -> "S3Folder":
        """Return a folder in this one, with the same client."""
        folder = S3Folder(f"{self.url}/{name}")
        folder._clients = self._clients
        return folder

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _pages(self, what: str, entries: str, **more: str) -> Iterator[dict[str, Any]]:
        with _translate_boto_errors("listing", self.url):
            pages = self.client.get_paginator(what)
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix, **more):
                yield from page.get(entries, [])

    def folders(self) -> list[str]:
        """Return the names of the folders in this one."""
        found = self._pages("list_objects_v2", "CommonPrefixes", Delimiter="/")
        return [entry["Prefix"][len(self._prefix) : -1] for entry in found]

    def objects(self) -> dict[str, int]:
        """Return the objects in this folder and below: name → bytes."""
        found = self._pages("list_objects_v2", "Contents")
        return {entry["Key"][len(self._prefix) :]: int(entry["Size"]) for entry in found}

    def digest(self, name: str) -> str:
        """Return the digest that an object was uploaded with; empty if none is there, or not by us."""
        try:
            with _translate_boto_errors("looking", f"{self.url}/{name}"):
                return self.client.head_object(**self._at(name))["Metadata"].get(_DIGEST, "")
        except RemoteError as exc:
            if exc.code == "404":
                return ""
            raise

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of a small object; None if there is none.

        Raises:
            RemoteError: S3 refuses or cannot be reached.
            DataError: it has more than `max_bytes` bytes.
        """
        try:
            return self._get(name, max_bytes)
        except RemoteError as exc:
            if exc.code == "NoSuchKey":
                return None
            raise

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of an object, at least one.

        Raises:
            RemoteError: S3 refuses or cannot be reached, or the object ends before.
        """
        content = self._get(name, end - begin, Range=f"bytes={begin}-{end - 1}")
        if len(content) != end - begin:
            raise RemoteError(f"{self.url}/{name}: ends before byte {end}; upload it again")
        return content

    def _get(self, name: str, max_bytes: int, **more: str) -> bytes:
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        with _translate_boto_errors("reading", f"{self.url}/{name}"):
            for left in reversed(range(_BODY_TRIES)):
                answer = self.client.get_object(**self._at(name), **more)
                if answer["ContentLength"] > max_bytes:
                    raise DataError(f"{self.url}/{name}: has more than the {max_bytes} bytes that it may have")
                with suppress(*((HTTPClientError, IncompleteReadError) if left else ())):
                    return answer["Body"].read()
        raise AssertionError("the last try returns or raises")

    def write(self, name: str, content: bytes, digest: str = "") -> None:
        """Make or replace a small object.

        Raises:
            RemoteError: S3 refuses or cannot be reached.
        """
        with _translate_boto_errors("writing", f"{self.url}/{name}"):
            self.client.put_object(**self._at(name), Body=content, Metadata={_DIGEST: digest})

    def upload_file(self, name: str, path: Path, digest: str, on_bytes: Callable[[int], None]) -> None:
        """Make or replace an object from a file; it is there whole or not at all.

        Args:
            name: of the object.
            path: of the file.
            digest: kept with the object.
            on_bytes: called with the number of the bytes that went; an exception from it aborts the upload.

        Raises:
            RemoteError: S3 refuses or cannot be reached.
            OSError: the file cannot be read.
        """
        with _translate_boto_errors("uploading", f"{self.url}/{name}"), path.open("rb") as file:
            extra = {"Metadata": {_DIGEST: digest}}
            self.client.upload_fileobj(
                file, **self._at(name), ExtraArgs=extra, Callback=on_bytes, Config=_transfer_config()
            )

    def download_file(self, name: str, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        """Download an object to an empty file, which is for the caller to verify and to sync.

        Raises:
            RemoteError: S3 refuses or cannot be reached.
            OSError: the file cannot be written.
        """
        with _translate_boto_errors("reading", f"{self.url}/{name}"):
            self.client.download_fileobj(**self._at(name), Fileobj=file, Callback=on_bytes, Config=_transfer_config())

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there do not matter.

        Raises:
            RemoteError: S3 refuses or cannot be reached, or objects stay.
        """
        rest = list(names)
        while rest:
            keys = [{"Key": self._prefix + name} for name in rest[:1000]]
            with _translate_boto_errors("deleting", self.url):
                answer = self.client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if errors := answer.get("Errors"):  # it is no error of the request when single objects stay
                raise RemoteError(f"{self.url}: deleting failed for {len(errors)} objects ({errors[0].get('Code')})")
            rest = rest[1000:]

    def abort_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Abort the uploads in parts that killed processes left, which are paid for and never become objects.

        Args:
            is_ours: returns True for the names of the objects concerned.
        """
        left = [(entry["Key"], entry["UploadId"]) for entry in self._pages("list_multipart_uploads", "Uploads")]
        for key, upload_id in left:
            if is_ours(key[len(self._prefix) :]):
                with _translate_boto_errors("aborting an upload", self.url):
                    self.client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)


def _transfer_config() -> Any:
    from boto3.s3.transfer import TransferConfig

    # The other client, boto3's default on some machines, takes no file object.
    return TransferConfig(
        multipart_threshold=PART_BYTES,
        multipart_chunksize=PART_BYTES,
        max_concurrency=CONNECTIONS // 2,
        preferred_transfer_client="classic",
    )
