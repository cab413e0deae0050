"""A folder in an S3 bucket: the one module that knows boto3.

Credentials, region and endpoint come from where boto3 looks for them (environment, ~/.aws, the machine's role;
AWS_ENDPOINT_URL_S3 for another store than Amazon's); none of them stands in a message or a file of ours. Large objects
go in parts over several connections by boto3's own transfer manager, which gives up its parts when it fails; each part
carries a CRC32 that the store checks. What an object holds is written beside it, as metadata (`lt-content`).

Memory of an upload: 10 parts of 16 MiB, or larger ones where an object would have more than 10,000.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, storage
from lt_ckpt.s3.address import split
from lt_ckpt.s3.contents import CheckedReader, Content, of_bytes

if TYPE_CHECKING:
    from boto3.s3.transfer import TransferConfig

CHUNK_BYTES = 16 * 2**20
STREAMS = 10
METADATA = "lt-content"
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the machine a role"
_PASSES = {
    ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "503", "500"): "S3 is busy: try again later",
    ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"): "bytes changed on the way: try again",
}
_REMEDIES = {
    ("AccessDenied", "AllAccessDisabled", "403"): "the credentials may not do that: allow s3:ListBucket, s3:GetObject, "
    "s3:PutObject, s3:DeleteObject, s3:ListBucketMultipartUploads and s3:AbortMultipartUpload there",
    ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure"): "S3 does not know the credentials: "
    + _CREDENTIALS,
    ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"): "the credentials have "
    "expired: get new ones",
    ("NoSuchBucket",): "there is no such bucket: check the name, or make it",
    ("NoSuchKey", "404", "NotFound"): "there is no such object",
    ("PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"): "the bucket "
    "lies in another region: set AWS_REGION to its own",
    ("RequestTimeTooSkewed",): "the clock of this machine is wrong: set it",
}


class ServiceError(CheckpointError):
    """The store refuses or cannot be reached; another time it may."""


class UnreachableError(ServiceError):
    """The store cannot be reached or is busy: nobody has to mend anything but the network."""

    exit_code = 75


@contextmanager
def _asking(doing: str, url: str) -> Iterator[None]:
    """Turns boto3's errors into ours, with a remedy and without what boto3's may quote."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as known

    try:
        yield
    except known.ClientError as exc:
        code = str(exc.response.get("Error", {}).get("Code", "unknown"))
        for kind, remedies in ((UnreachableError, _PASSES), (ServiceError, _REMEDIES)):
            for codes, remedy in remedies.items():
                if code in codes:
                    raise kind(f"{url}: {doing} failed ({code}): {remedy}") from None
        raise ServiceError(f"{url}: {doing} failed ({code}): see the store's own log") from None
    except (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError):
        raise ServiceError(f"{url}: {doing} failed: there are no credentials: {_CREDENTIALS}") from None
    except (known.ProfileNotFound, known.NoRegionError, known.ConfigParseError, known.TokenRetrievalError) as exc:
        raise ServiceError(
            f"{url}: {doing} failed: {type(exc).__name__}; check AWS_PROFILE, AWS_REGION and ~/.aws"
        ) from None
    except (known.BotoCoreError, Boto3Error) as exc:
        raise UnreachableError(
            f"{url}: {doing} failed: {type(exc).__name__}; check the network, the proxy and AWS_ENDPOINT_URL_S3"
        ) from None


def make_client() -> Any:
    """Makes a client; each has its own session, so that threads may make them."""
    try:
        from boto3.session import Session
        from botocore.config import Config
    except ModuleNotFoundError as exc:
        if exc.name not in ("boto3", "botocore"):
            raise
        raise CheckpointError("s3://: boto3 is not installed: pip install 'lt-ckpt[s3]'") from None
    tries: dict[str, Any] = {"mode": "standard"}
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        tries["total_max_attempts"] = 5
    config = Config(connect_timeout=10, read_timeout=30, retries=tries, max_pool_connections=2 * STREAMS)
    with _asking("making a client", "s3://"):
        try:
            return Session().client("s3", config=config)
        except ValueError as exc:
            if isinstance(exc, CheckpointError):
                raise
            raise CheckpointError("s3://: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is not an address") from None


def _config() -> "TransferConfig":
    from boto3.s3.transfer import TransferConfig

    # The other transfer client, which boto3 takes on some machines, does not read files in order.
    return TransferConfig(
        multipart_threshold=CHUNK_BYTES,
        multipart_chunksize=CHUNK_BYTES,
        max_concurrency=STREAMS,
        preferred_transfer_client="classic",
    )


class S3Folder:
    """A folder in a bucket.

    Attributes:
        url: `s3://bucket/prefix`, without a slash at the end.
    """

    def __init__(self, url: str, client: Any = None) -> None:
        """Opens it; nothing is asked yet.

        Raises:
            CheckpointError: It is no address of a folder in a bucket, or boto3 is missing.
        """
        self.url = url.rstrip("/")
        self._bucket, self._prefix = split(self.url)
        self._client = client or make_client()

    def below(self, name: str) -> "S3Folder":
        """A folder in this one."""
        return S3Folder(f"{self.url}/{name}", self._client)

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def folders(self) -> list[str]:
        """Returns the names of the folders in this one."""
        return [entry["Prefix"][len(self._prefix) : -1] for entry in self._pages("CommonPrefixes", Delimiter="/")]

    def sizes(self) -> dict[str, int]:
        """Returns the objects in this folder and below: name → bytes."""
        return {entry["Key"][len(self._prefix) :]: int(entry["Size"]) for entry in self._pages("Contents")}

    def _pages(self, what: str, **more: str) -> Iterator[dict[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2")
        with _asking("listing", self.url):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix, **more):
                yield from page.get(what, [])

    def identity(self, name: str) -> str:
        """Returns the identity of the content that was uploaded as this object; empty when it is not from us."""
        with _asking("looking", f"{self.url}/{name}"):
            return self._client.head_object(**self._at(name))["Metadata"].get(METADATA, "")

    def read(self, name: str, limit: int) -> bytes | None:
        """Returns what a small object holds, None when there is none."""
        from botocore.exceptions import ClientError

        with _asking("reading", f"{self.url}/{name}"):
            try:
                answer = self._client.get_object(**self._at(name))
            except ClientError as exc:
                if exc.response.get("Error", {}).get("Code") == "NoSuchKey":
                    return None
                raise
            if answer["ContentLength"] > limit:
                answer["Body"].close()
                raise CheckpointError(f"{self.url}/{name}: has more than the {limit} bytes that it may have")
            return answer["Body"].read()

    def write(self, name: str, data: bytes) -> None:
        """Makes a small object, or replaces it."""
        with _asking("writing", f"{self.url}/{name}"):
            self._client.put_object(**self._at(name), Body=data, Metadata={METADATA: of_bytes(data).identity})

    def send(self, name: str, path: Path, content: Content, told: Callable[[int], None]) -> None:
        """Uploads a file, and lets nothing else than its content become an object.

        Args:
            name: The object.
            path: The file.
            content: What it must hold.
            told: Told the bytes read; an exception that it raises ends the upload, and nothing is left of it.

        Raises:
            DamagedError: It holds something else.
            CheckpointError: It cannot be read.
            ServiceError: The store refuses or cannot be reached.
        """
        with CheckedReader(path, content, told) as reader, _asking("uploading", f"{self.url}/{name}"):
            if content.n_bytes < CHUNK_BYTES:  # may be read twice, for the checksum and for a second try
                self._client.put_object(**self._at(name), Body=reader.read(), Metadata={METADATA: content.identity})
                return
            self._client.upload_fileobj(
                reader, **self._at(name), ExtraArgs={"Metadata": {METADATA: content.identity}}, Config=_config()
            )

    def fetch(self, name: str, path: Path, told: Callable[[int], None]) -> None:
        """Downloads an object into a file, which is made or replaced; it is on the disk when this returns."""
        with storage("downloading", path), open(path, "wb") as file:
            with _asking("downloading", f"{self.url}/{name}"):
                self._client.download_fileobj(Fileobj=file, **self._at(name), Callback=told, Config=_config())
            file.flush()
            files.fsync(file.fileno())

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; those that are not there do not matter."""
        rest = list(names)
        while rest:
            keys = [{"Key": self._prefix + name} for name in rest[:1000]]
            with _asking("deleting", self.url):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if errors := answer.get("Errors"):  # it is no error of the request when single objects stay
                raise ServiceError(f"{self.url}: deleting failed for {len(errors)} objects ({errors[0].get('Code')})")
            rest = rest[1000:]

    def abort_unfinished(self, wanted: Callable[[str], bool]) -> int:
        """Gives up the parts of objects whose upload was cut off, which would be paid for and never be seen.

        Args:
            wanted: Tells by the name of an object whether it is meant.

        Returns:
            How many uploads there were.
        """
        pages = self._client.get_paginator("list_multipart_uploads")
        with _asking("looking for unfinished uploads", self.url):
            found = [
                entry
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Uploads", [])
                if wanted(entry["Key"][len(self._prefix) :])
            ]
            for entry in found:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=entry["Key"], UploadId=entry["UploadId"])
        return len(found)
