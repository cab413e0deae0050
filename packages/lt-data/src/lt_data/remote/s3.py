"""A folder in an S3 bucket: the one module that knows boto3.

Credentials, region and endpoint come from where boto3 looks for them (environment, ~/.aws, the machine's role); none
of them stands in a message or a file of ours. Each request that carries bytes carries their SHA-256 too. Whole files go
and come by boto3's own transfer manager; single ranges, for readers of blocks, have the length that was asked for or
are asked for again. Not by fsspec: its caches know neither a limit that processes share nor the hash of a block.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from lt_data.errors import DataError
from lt_data.remote.contents import BLOCK_BYTES, FileHash, PartHash, PartReader, base64_text

LEAST_PART_BYTES = 5 * 2**20  # S3's own limit
_TRIES = 6  # for bytes that came wrong or not at all; boto3's own tries come on top
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/([!-~]+))?")
_MD5 = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the machine a role"
_REMEDIES = {
    ("AccessDenied", "AllAccessDisabled", "403"): "the credentials may not do that: allow s3:ListBucket, s3:GetObject, "
    "s3:PutObject, s3:DeleteObject, s3:ListBucketMultipartUploads and s3:AbortMultipartUpload "
    "there (to read: the first two)",
    ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure"): "S3 does not know the credentials: "
    + _CREDENTIALS,
    ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"): "the credentials have "
    "expired: get new ones and run the same command again; it goes on where it was",
    ("NoSuchBucket",): "there is no such bucket: check the name, or make it",
    ("NoSuchKey", "404", "NotFound"): "there is no such object: check the address",
    ("PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"): "the bucket "
    "lies in another region: set AWS_REGION to its own",
    ("RequestTimeTooSkewed",): "the clock of this machine is wrong: set it",
    ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "503", "500"): "S3 is busy: run the same "
    "command again later; it goes on where it was",
    ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"): "bytes changed on the way: try again",
}


class RemoteError(DataError):
    """The store refuses or cannot be reached; another time it may answer.

    Attributes:
        code: S3's own word for it, empty where S3 said nothing.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True)
class S3Options:
    """How to speak to S3.

    Attributes:
        endpoint_url: another store than Amazon's; None: what boto3 is set up for.
        connections: requests at a time.
        timeout: seconds without a byte after which a connection is given up.
        part_bytes: of the parts and ranges of large files, a whole number of MiB.
    """

    endpoint_url: str | None = None
    connections: int = 10
    timeout: float = 30.0
    part_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        if self.endpoint_url is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.endpoint_url):
            raise DataError(f"endpoint_url={self.endpoint_url!r}: give an address such as https://s3.example.org")
        if not 1 <= self.connections <= 256:
            raise DataError(f"connections={self.connections}: from 1 to 256")
        if not self.timeout > 0:
            raise DataError(f"timeout={self.timeout}: more than 0 seconds")
        if self.part_bytes < LEAST_PART_BYTES or self.part_bytes % BLOCK_BYTES:
            raise DataError(f"part_bytes={self.part_bytes}: a whole number of MiB, at least 5")


@dataclass(frozen=True, kw_only=True)
class Remote:
    """What S3 says of an object: size, ETag without quotes (empty where it says nothing of the bytes), checksum."""

    n_bytes: int
    etag: str
    checksum: str = ""

    def is_of(self, content: FileHash) -> bool:
        """Whether these are the bytes of an object, as far as S3's own hashes tell; False where there are none."""
        if self.n_bytes != content.n_bytes or not (self.etag or self.checksum):
            return False
        # Some stores leave out the number of parts behind the checksum of an object that came in parts.
        checksums = ("", content.checksum, content.checksum.partition("-")[0])
        return self.etag in ("", content.etag) and self.checksum in checksums


def pause(attempt: int) -> None:
    """Wait before another try: 0.2 s, 0.4 s and so on."""
    time.sleep(min(0.2 * 2**attempt, 10.0))


@contextmanager
def _asking(doing: str, url: str) -> Iterator[None]:
    """Turn boto3's errors into ours, with a remedy and without what boto3's may quote."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as known
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    try:
        yield
    except known.ClientError as exc:
        code = str(exc.response.get("Error", {}).get("Code", "unknown"))
        remedy = next((text for codes, text in _REMEDIES.items() if code in codes), "see the store's own log")
        raise RemoteError(f"{url}: {doing} failed ({code}): {remedy}", code) from None
    except (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError):
        raise RemoteError(f"{url}: {doing} failed: there are no credentials: {_CREDENTIALS}", "credentials") from None
    except (known.ProfileNotFound, known.NoRegionError, known.ConfigParseError, known.TokenRetrievalError) as exc:
        raise RemoteError(
            f"{url}: {doing} failed: {type(exc).__name__}; check AWS_PROFILE, AWS_REGION and ~/.aws", "configuration"
        ) from None
    except (known.BotoCoreError, Boto3Error, RetriesExceededError, S3DownloadFailedError) as exc:
        raise RemoteError(
            f"{url}: {doing} failed: {type(exc).__name__}; check the network, the proxy and the endpoint's address"
        ) from None


def make_client(options: S3Options) -> Any:
    """Make a client, which threads may share.

    Raises:
        DataError: boto3 is missing, or is set up in a way that it does not take.
    """
    try:
        from boto3.session import Session
        from botocore.config import Config
    except ModuleNotFoundError as exc:
        if exc.name not in ("boto3", "botocore"):
            raise
        raise DataError('s3://: boto3 is not installed: pip install "lt-data[s3]"') from None
    config = Config(
        connect_timeout=min(10.0, options.timeout),
        read_timeout=options.timeout,
        retries={"mode": "standard", "total_max_attempts": 6},
        max_pool_connections=options.connections + 2,
    )
    with _asking("making a client", "s3://"):
        try:
            return Session().client("s3", config=config, endpoint_url=options.endpoint_url)
        except ValueError as exc:
            if isinstance(exc, DataError):
                raise
            raise DataError("s3://: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is not an address") from None


class S3Folder:
    """A folder in a bucket.

    Attributes:
        url: `s3://bucket/prefix`, without a slash at the end.
        options: how it is spoken to.
    """

    def __init__(self, url: str, options: S3Options | None = None, client: Any = None) -> None:
        """Open it; nothing is asked yet.

        Raises:
            DataError: it is no address of a folder in a bucket, or boto3 is missing.
        """
        self.url = url.rstrip("/")
        self.options = options or S3Options()
        found = _URL.fullmatch(self.url)
        parts = (found[2] or "").split("/") if found else []
        if found is None or (found[2] and any(part in ("", ".", "..") for part in parts)):
            raise DataError(f"{url}: must be s3://bucket/folder")
        self._bucket = found[1]
        self._prefix = f"{found[2]}/" if found[2] else ""
        self._express = self._bucket.endswith("--x-s3")  # takes no MD5, and its ETags are none
        self._client = client or make_client(self.options)

    def _at(self, name: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def objects(self) -> dict[str, int]:
        """The objects in this folder and below: name → bytes."""
        pages = self._client.get_paginator("list_objects_v2")
        with _asking("listing", self.url):
            return {
                entry["Key"][len(self._prefix) :]: int(entry["Size"])
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Contents", [])
                if entry["Key"] != self._prefix  # what some consoles make to show a folder
            }

    def look(self, name: str) -> Remote | None:
        """What S3 says of an object; None when there is none."""
        try:
            with _asking("looking", f"{self.url}/{name}"):
                answer = self._client.head_object(**self._at(name), ChecksumMode="ENABLED")
        except RemoteError as exc:
            if exc.code in ("404", "NoSuchKey", "NotFound"):
                return None
            raise
        return Remote(
            n_bytes=int(answer["ContentLength"]),
            etag=self._etag_of_bytes(answer),
            checksum=answer.get("ChecksumSHA256", ""),
        )

    def _etag_of_bytes(self, answer: dict[str, Any]) -> str:
        """The ETag where it is made of the bytes' MD5; empty where an object is encrypted in another way."""
        etag = str(answer.get("ETag", "")).strip('"')
        other = str(answer.get("ServerSideEncryption", "AES256")) != "AES256" or "SSECustomerAlgorithm" in answer
        return "" if other or self._express or not _MD5.fullmatch(etag) else etag

    def read(self, name: str, limit: int) -> bytes | None:
        """What a small object holds, None when there is none.

        Raises:
            RemoteError: its bytes do not come, or not those of its ETag, after several tries.
            DataError: it has more than `limit` bytes.
        """
        for attempt in range(_TRIES):
            found = self.look(name)
            if found is None:
                return None
            if found.n_bytes > limit:
                raise DataError(f"{self.url}/{name}: has more than the {limit} bytes that it may have")
            data = self.read_range(name, 0, found.n_bytes) if found.n_bytes else b""
            if "-" in found.etag or not found.etag or found.etag == PartHash.of(data).md5.hex():
                return data
            pause(attempt)
        raise RemoteError(f"{self.url}/{name}: reading failed: other bytes come than S3 says it holds, {_TRIES} times")

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of an object, at least one.

        Raises:
            RemoteError: they did not come, after several tries.
        """
        for attempt in range(_TRIES):
            try:
                return self._read_range(name, begin, end)
            except RemoteError as exc:
                if exc.code or attempt == _TRIES - 1:  # what S3 itself refuses has been tried again by boto3
                    raise
                pause(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _read_range(self, name: str, begin: int, end: int) -> bytes:
        url = f"{self.url}/{name}"
        with _asking("reading", url):
            answer = self._client.get_object(**self._at(name), Range=f"bytes={begin}-{end - 1}")
            with answer["Body"] as body:
                if not str(answer.get("ContentRange", "")).startswith(f"bytes {begin}-{end - 1}/"):
                    raise RemoteError(f"{url}: reading failed: another range came than was asked for")
                data = body.read(end - begin)
        if len(data) < end - begin:
            raise RemoteError(f"{url}: reading failed: the body ended early")
        return data

    def write(self, name: str, data: bytes | memoryview, part: PartHash) -> None:
        """Make an object of bytes that come in one request, or replace it.

        Raises:
            RemoteError: it did not get there as it is, after several tries.
        """

        def send() -> bool:
            answer = self._client.put_object(**self._at(name), Body=bytes(data), **self._checked(part))
            return self._confirmed(answer, part)

        self._send("uploading", f"{self.url}/{name}", send)

    def _checked(self, part: PartHash) -> dict[str, Any]:
        checks = {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": base64_text(part.sha256)}
        return checks if self._express else {**checks, "ContentMD5": base64_text(part.md5)}

    def _confirmed(self, answer: dict[str, Any], part: PartHash) -> bool:
        etag, checksum = self._etag_of_bytes(answer), answer.get("ChecksumSHA256", "")
        said = Remote(n_bytes=part.n_bytes, etag=etag, checksum=checksum)
        # A store that says nothing has compared the MD5 that it was given.
        return not (etag or checksum) or said.is_of(FileHash(sha256="", parts=(part,)))

    def _send(self, doing: str, url: str, send: Callable[[], bool]) -> None:
        for attempt in range(_TRIES):
            with _asking(doing, url):
                try:
                    if send():
                        return
                except self._client.exceptions.ClientError as exc:
                    code = exc.response.get("Error", {}).get("Code")
                    if code not in ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"):
                        raise
            pause(attempt)
        raise RemoteError(f"{url}: {doing} failed: what S3 says it holds is not what was sent, {_TRIES} times over")

    @contextmanager
    def transfers(self) -> "Iterator[Transfers]":
        """Open boto3's transfer manager, which threads may share; an exception cancels what is in flight."""
        from s3transfer.manager import TransferConfig, TransferManager

        config = TransferConfig(
            multipart_threshold=self.options.part_bytes,
            multipart_chunksize=self.options.part_bytes,
            max_request_concurrency=self.options.connections,
            io_chunksize=BLOCK_BYTES,
            max_io_queue_size=2 * self.options.connections,
        )
        with TransferManager(self._client, config) as manager:
            yield Transfers(self, manager, self._at)

    def unfinished(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Return the uploads in parts of these names that were begun and not finished: (name, upload id)."""
        wanted = {self._prefix + name: name for name in names}
        pages = self._client.get_paginator("list_multipart_uploads")
        with _asking("looking for unfinished uploads", self.url):
            return [
                (wanted[entry["Key"]], entry["UploadId"])
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Uploads", [])
                if entry["Key"] in wanted
            ]

    def give_up(self, name: str, upload: str) -> None:
        """Give up an upload in parts, which would be paid for and never be seen; it may be gone already."""
        try:
            with _asking("giving up an upload", f"{self.url}/{name}"):
                self._client.abort_multipart_upload(**self._at(name), UploadId=upload)
        except RemoteError as exc:
            if exc.code != "NoSuchUpload":
                raise

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there do not matter."""
        rest = list(names)
        while rest:
            keys = [{"Key": self._prefix + name} for name in rest[:1000]]
            with _asking("deleting", self.url):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if errors := answer.get("Errors"):  # it is no error of the request when single objects stay
                raise RemoteError(f"{self.url}: deleting failed for {len(errors)} objects ({errors[0].get('Code')})")
            rest = rest[1000:]


class Transfers:
    """Uploads and downloads by boto3's transfer manager (`S3Folder.transfers`).

    Attributes:
        url: the folder's.
    """

    def __init__(self, target: S3Folder, manager: Any, at: Callable[[str], dict[str, Any]]) -> None:
        self.url = target.url
        self._manager, self._at = manager, at

    def upload(self, name: str, content: PartReader, on_bytes: Callable[[int], None]) -> None:
        """Upload a file in parts of `part_bytes`, read once from its beginning.

        `on_bytes` is called with the number of the bytes that went. Every request carries the SHA-256 of its bytes.
        What the object holds in the end is for the caller to compare.

        Raises:
            RemoteError: S3 refuses or cannot be reached.
            DataError: the file cannot be read, or is another by now; nothing of it stays in S3.
        """
        where, extra = self._at(name), {"ChecksumAlgorithm": "SHA256"}
        subscriber = _subscriber(content.n_bytes, on_bytes)
        with _asking("uploading", f"{self.url}/{name}"):
            self._manager.upload(content, where["Bucket"], where["Key"], extra, [subscriber]).result()

    def download(self, name: str, target: BinaryIO, n_bytes: int, on_bytes: Callable[[int], None]) -> None:
        """Download an object in ranges of `part_bytes`, several at a time, into an empty file.

        What came is for the caller to verify.

        Raises:
            RemoteError: S3 refuses or cannot be reached.
            OSError: the file cannot be written.
        """
        where, subscriber = self._at(name), _subscriber(n_bytes, on_bytes)
        with _asking("reading", f"{self.url}/{name}"):
            self._manager.download(where["Bucket"], where["Key"], target, None, [subscriber]).result()


def _subscriber(n_bytes: int, on_bytes: Callable[[int], None]) -> Any:
    """Return what tells the transfer manager the size, by which it chooses ranges, and counts bytes."""
    from s3transfer.subscribers import BaseSubscriber

    class Subscriber(BaseSubscriber):
        def on_queued(self, future: Any, **_: Any) -> None:
            future.meta.provide_transfer_size(n_bytes)

        def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
            on_bytes(bytes_transferred)

    return Subscriber()
