"""Grammar of AWS names and addresses in a request: buckets, images, keys, ARNs, parts of a VPC.

SageMaker's service model lets almost any text pass as one of these; the other services then refuse it, minutes after
the job was made. Each function returns the problem with its remedy, or None. Pure; nothing is looked up.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lt_launch.sagemaker.violation import truncated_repr

__all__ = [
    "Problem",
    "bucket_problem",
    "image_problem",
    "key_problem",
    "partition_of",
    "region_of",
    "region_problem",
    "vpc_id_problem",
]


class Problem(NamedTuple):
    """Problem of a text, which it quotes, and what to write instead."""

    problem: str
    remedy: str


BUCKET_RULES = (
    (r"[a-z0-9.-]*", "a bucket's name has lower-case letters, digits, '.' and '-' alone"),
    (r".{3,63}", "a bucket's name has 3 to 63 characters"),
    (r"[a-z0-9](.*[a-z0-9])?", "a bucket's name starts and ends with a letter or digit"),
    (r"(?!.*\.\.).*", "a bucket's name has no two dots in a row"),
    (r"(?!\d+\.\d+\.\d+\.\d+$).*", "a bucket's name is no IP address"),
    (r"(?!xn--|sthree-|amzn-s3-demo-).*", "AWS keeps names that start with xn--, sthree- or amzn-s3-demo- for itself"),
    (r"(?!.*(--ol-s3|\.mrap|--table-s3)$).*", "names that end with --ol-s3, .mrap or --table-s3 are no buckets"),
)
"""What a bucket's name must fit, in the order in which it is told."""
REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
REPOSITORY = r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
IMAGE = re.compile(
    rf"\d{{12}}\.(?:dkr\.ecr(?:-fips)?\.(?P<region>{REGION})\.(?:amazonaws\.com(?:\.cn)?|c2s\.ic\.gov|sc2s\.sgov\.gov)"
    rf"|dkr-ecr(?:-fips)?\.(?P<dual>{REGION})\.on\.(?:aws|amazonwebservices\.com\.cn))"
    rf"/{REPOSITORY}(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)
ARN = re.compile(r"arn:(?P<partition>aws[a-z-]*):[a-z0-9-]+:(?P<region>[a-z0-9-]*):.*")
KMS_KEY = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|mrk-[0-9a-f]{32}|alias/[A-Za-z0-9/_-]+"
    r"|arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:(?:key|alias)/[A-Za-z0-9/_-]+"
)
PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov", "us-iso-": "aws-iso", "us-isob-": "aws-iso-b"}
"""Partition of a region by its prefix; every other region is in `aws`."""
IMAGE_REMEDY = "docker push it to ECR and name it ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG"


def bucket_problem(address: str) -> Problem | None:
    """Check an address s3://BUCKET/KEY."""
    if address.startswith("https://"):
        return Problem(f"{truncated_repr(address)} is not an address of S3", "write it as s3://BUCKET/FOLDER")
    bucket, _, key = address.removeprefix("s3://").partition("/")
    if bucket.startswith("arn:"):  # an access point
        return None
    for pattern, text in BUCKET_RULES:
        if not re.fullmatch(pattern, bucket):
            return Problem(f"{truncated_repr(bucket)} is not the name of a bucket", text)
    if key != key.strip() or any(not char.isprintable() for char in key):
        return Problem(f"{truncated_repr(address)} has blanks at an end or control characters", "leave them out")
    if "*" in key:
        return Problem(f"{truncated_repr(address)} is a pattern, and S3 has none", "give the folder; all of it is read")
    return None


def image_problem(image: str) -> Problem | None:
    """Check the name of an image: without further settings SageMaker pulls from private ECR alone."""
    return None if IMAGE.fullmatch(image) else Problem(f"{truncated_repr(image)} is not an image in ECR", IMAGE_REMEDY)


def key_problem(key: str) -> Problem | None:
    """Check the name of a KMS key."""
    return (
        None
        if KMS_KEY.fullmatch(key)
        else Problem(f"{truncated_repr(key)} is not a KMS key", "give its id, alias/NAME, or the ARN of one of them")
    )


def region_problem(region: str) -> Problem | None:
    """Check the name of a region."""
    if re.fullmatch(REGION, region):
        return None
    near = re.match(REGION, region)
    return Problem(f"{truncated_repr(region)} is not a region", f"write one such as {near[0] if near else 'us-east-1'}")


def vpc_id_problem(kind: str, value: str) -> Problem | None:
    """Check an id of a VPC's part: `kind` is its prefix, subnet or sg."""
    if re.fullmatch(rf"{kind}-[0-9a-f]+", value):
        return None
    names = {"subnet": "subnet", "sg": "security group"}
    return Problem(f"{truncated_repr(value)} is not a {names[kind]}", f"give ids of the form {kind}-0a1b2c3d")


def region_of(name: str) -> str:
    """Return the region in an ARN or an image's name; "" if there is none."""
    found = ARN.fullmatch(name) or IMAGE.fullmatch(name)
    return (found["region"] or found.groupdict().get("dual") or "") if found else ""


def partition_of(region: str) -> str:
    """Return the partition of a region, the second word of its ARNs."""
    return next((name for prefix, name in PARTITIONS.items() if region.startswith(prefix)), "aws")
