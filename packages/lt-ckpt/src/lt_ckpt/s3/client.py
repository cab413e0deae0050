"""S3 folder client, the only module that uses boto3.

Credentials, region and endpoint come from boto3's usual places (environment, ~/.aws, the machine's role;
AWS_ENDPOINT_URL_S3 for another store than Amazon's); none of them appears in our messages or files. Large objects are
uploaded in parts over several connections by boto3's transfer manager, which aborts the upload when it fails; the store
checks a CRC32 of each part. An object's content identity is stored as its metadata (`lt-content`).

Memory of an upload: 10 parts of 16 MiB, or larger ones where an object would have more than 10,000.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_ckpt import files
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.s3.address import split_url
from lt_ckpt.s3.file_digest import CheckedReader, FileDigest, digest_bytes

if TYPE_CHECKING:
    from boto3.s3.transfer import TransferConfig

CHUNK_BYTES = 16 * 2**20
MAX_CONCURRENCY = 10
CONTENT_METADATA_KEY = "lt-content"
_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or give the machine a role"
_TRANSIENT_ERRORS = {
    ("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "503", "500"): "S3 is busy: try again later",
    ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"): "bytes changed in transit: try again",
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
    "is in another region: set AWS_REGION to its own",
    ("RequestTimeTooSkewed",): "the clock of this machine is wrong: set it",
}


class ServiceError(CheckpointError):
    """Refusal by the store, or failure to reach it; a later attempt may succeed."""


class UnreachableError(ServiceError):
    """Unreachable or busy store: only the network needs attention."""

    exit_code = 75


@contextmanager
def _translate_boto_errors(operation: str, url: str) -> Iterator[None]:
    """Translate boto3's errors into ours, with a remedy and without text that boto3 may quote."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as known

    try:
        yield
    except known.ClientError as exc:
        code = str(exc.response.get("Error", {}).get("Code", "unknown"))
        for kind, remedies in ((UnreachableError, _TRANSIENT_ERRORS), (ServiceError, _REMEDIES)):
            for codes, remedy in remedies.items():
                if code in codes:
                    raise kind(f"{url}: {operation} failed ({code}): {remedy}") from None
        raise ServiceError(f"{url}: {operation} failed ({code}): see the store's own log") from None
    except (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError):
        raise ServiceError(f"{url}: {operation} failed: there are no credentials: {_CREDENTIALS}") from None
    except (known.ProfileNotFound, known.NoRegionError, known.ConfigParseError, known.TokenRetrievalError) as exc:
        raise ServiceError(
            f"{url}: {operation} failed: {type(exc).__name__}; check AWS_PROFILE, AWS_REGION and ~/.aws"
        ) from None
    except (known.BotoCoreError, Boto3Error) as exc:
        raise UnreachableError(
            f"{url}: {operation} failed: {type(exc).__name__}; check the network, the proxy and AWS_ENDPOINT_URL_S3"
        ) from None


def make_client() -> Any:
    """Make a client with its own session, so that any thread may make one."""
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
    config = Config(connect_timeout=10, read_timeout=30, retries=tries, max_pool_connections=2 * MAX_CONCURRENCY)
    with _translate_boto_errors("making a client", "s3://"):
        try:
            return Session().client("s3", config=config)
        except ValueError as exc:
            if isinstance(exc, CheckpointError):
                raise
            raise CheckpointError("s3://: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is not an address") from None


def _transfer_config() -> "TransferConfig":
    from boto3.s3.transfer import TransferConfig

    # The other transfer client, boto3's default on some machines, does not read files in order.
    return TransferConfig(
        multipart_threshold=CHUNK_BYTES,
        multipart_chunksize=CHUNK_BYTES,
        max_concurrency=MAX_CONCURRENCY,
        preferred_transfer_client="classic",
    )


class S3Folder:
    """Folder in a bucket.

    Attributes:
        url: `s3://bucket/prefix`, without a slash at the end.
    """

    def __init__(self, url: str, client: Any = None) -> None:
        """Open a folder; no request is made.

        Raises:
            CheckpointError: Not an address of a folder in a bucket, or boto3 is missing.
        """
        self.url = url.rstrip("/")
        self._bucket, self._prefix = split_url(self.url)
        self._client = client or make_client()

    def subfolder(self, name: str) -> "S3Folder":
        """Return a folder in this one."""
        return S3Folder(f"{self.url}/{name}", self._client)

    def _object_args(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def list_folders(self) -> list[str]:
        """Return the names of the folders in this one."""
        return [entry["Prefix"][len(self._prefix) : -1] for entry in self._list_pages("CommonPrefixes", Delimiter="/")]

    def list_sizes(self) -> dict[str, int]:
        """Return the objects in this folder and below: name → bytes."""
        return {entry["Key"][len(self._prefix) :]: int(entry["Size"]) for entry in self._list_pages("Contents")}

    def _list_pages(self, what: str, **more: str) -> Iterator[dict[str, Any]]:
        pages = self._client.get_paginator("list_objects_v2")
        with _translate_boto_errors("listing", self.url):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix, **more):
                yield from page.get(what, [])

    def read_identity(self, name: str) -> str:
        """Return the content identity stored with this object; empty if it is not from us."""
        with _translate_boto_errors("reading metadata", f"{self.url}/{name}"):
            return self._client.head_object(**self._object_args(name))["Metadata"].get(CONTENT_METADATA_KEY, "")

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the content of a small object, None if there is none."""
        from botocore.exceptions import ClientError

        with _translate_boto_errors("reading", f"{self.url}/{name}"):
            try:
                response = self._client.get_object(**self._object_args(name))
            except ClientError as exc:
                if exc.response.get("Error", {}).get("Code") == "NoSuchKey":
                    return None
                raise
            if response["ContentLength"] > max_bytes:
                response["Body"].close()
                raise CheckpointError(f"{self.url}/{name}: has more than the {max_bytes} bytes allowed")
            return response["Body"].read()

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a small object."""
        with _translate_boto_errors("writing", f"{self.url}/{name}"):
            self._client.put_object(
                **self._object_args(name), Body=data, Metadata={CONTENT_METADATA_KEY: digest_bytes(data).identity}
            )

    def upload_file(self, name: str, path: Path, content: FileDigest, on_bytes: Callable[[int], None]) -> None:
        """Upload a file; nothing but the given content becomes an object.

        Args:
            name: The object.
            path: The file.
            content: Its expected content.
            on_bytes: Called with the bytes read; an exception from it ends the upload, and nothing of it remains.

        Raises:
            DamagedError: The file has other content.
            CheckpointError: It cannot be read.
            ServiceError: The store refuses or cannot be reached.
        """
        with (
            CheckedReader(path, content, on_bytes) as reader,
            _translate_boto_errors("uploading", f"{self.url}/{name}"),
        ):
            if content.n_bytes < CHUNK_BYTES:  # may be read twice, for the checksum and for a retry
                self._client.put_object(
                    **self._object_args(name), Body=reader.read(), Metadata={CONTENT_METADATA_KEY: content.identity}
                )
                return
            self._client.upload_fileobj(
                reader,
                **self._object_args(name),
                ExtraArgs={"Metadata": {CONTENT_METADATA_KEY: content.identity}},
                Config=_transfer_config(),
            )

    def download_file(self, name: str, path: Path, on_bytes: Callable[[int], None]) -> None:
        """Download an object into a new file; it is on the disk when this returns."""
        with translate_os_errors("downloading", path), os.fdopen(files.create_file(path), "wb") as file:
            with _translate_boto_errors("downloading", f"{self.url}/{name}"):
                self._client.download_fileobj(
                    Fileobj=file, **self._object_args(name), Callback=on_bytes, Config=_transfer_config()
                )
            file.flush()
            files.fsync(file.fileno())

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are ignored."""
        remaining = list(names)
        while remaining:
            keys = [{"Key": self._prefix + name} for name in remaining[:1000]]
            with _translate_boto_errors("deleting", self.url):
                response = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            if errors := response.get("Errors"):  # the request succeeds even if some objects were not deleted
                raise ServiceError(f"{self.url}: deleting failed for {len(errors)} objects ({errors[0].get('Code')})")
            remaining = remaining[1000:]

    def abort_multipart_uploads(self, should_abort: Callable[[str], bool]) -> int:
        """Abort interrupted multipart uploads, whose parts would cost money and never become objects.

        Args:
            should_abort: Returns True for the names of the objects concerned.

        Returns:
            The number of aborted uploads.
        """
        pages = self._client.get_paginator("list_multipart_uploads")
        with _translate_boto_errors("looking for unfinished uploads", self.url):
            unfinished = [
                entry
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Uploads", [])
                if should_abort(entry["Key"][len(self._prefix) :])
            ]
            for entry in unfinished:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=entry["Key"], UploadId=entry["UploadId"])
        return len(unfinished)
