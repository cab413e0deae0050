"""Secrets: names of files and variables, and shapes of values, that must not be saved with a launch.

Pure and by pattern, so it finds what looks like a secret and nothing else: a password without a telling name or shape
passes. Linear in the text, apart from one join of a command's words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["SECRET_FILES", "find_secret", "find_secret_in_command", "find_secret_value", "is_secret_name"]

SECRET_FILES = re.compile(
    r"(?:^|/)(?:\.env(?:rc|\..*)?|.*\.env|\.(?:pg|ht)pass(?:wd)?|.*\.(?:pem|key|p12|pfx|kdbx|jks|keystore|ovpn|tfstate|tfvars)"
    r"|id_[^/.]*|.*credential.*|.*secret.*|.*passwords?(?:\.[^/]*)?|.*api_?key(?:\.[^/]*)?|\.netrc|\.npmrc|\.pypirc|\.s3cfg"
    r"|\.boto|rclone\.conf|(?:.*\.)?kubeconfig|.*service[-_]account.*\.json|auth\.json|.*token(?:\.(?:txt|json|ya?ml|toml))?)$"
    r"|(?:^|/)\.(?:aws|azure|ssh|kube|docker|gnupg|gcloud)/",
    re.IGNORECASE,
)
"""Paths of files of which only the name is kept, tracked or not."""
SECRET_NAME = re.compile(
    r"(?:PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|CREDENTIALS?|APIKEY)$"
    r"|(?:^|_)(?:PAT|PWD|PASS|AUTH|DSN|JWT|[A-Z0-9]+_KEY|ACCESS_KEY_ID)$"
)
PLAIN_NAME = re.compile(
    r"(?:^|_)(?:BOS|EOS|EOT|PAD|UNK|SEP|CLS|MASK)_TOKEN$|(?:^|_)(?:SORT|TEXT|ID|JSON|GROUP|PRIMARY|PUBLIC|HASH|CACHE)_KEY$"
    r"|^(?:OLD)?PWD$"
)
"""Names of the special tokens of a vocabulary and of columns, which end like secrets."""
ASSIGNMENT = re.compile(r"(?<![\w$.-])([A-Za-z_]\w*)=[\"']?(?=[^\s\"'$`;&|<>])")
"""A shell assignment of a literal value, not of another variable or of a command's output."""
OPTION = re.compile(r"(?<!\S)--?([A-Za-z][\w-]*)(?:=|\s+)[\"']?(?=[^\s\"'$`;&|<>-])")
"""An option with a literal value."""
WRITTEN = re.compile(
    r"(?<![\w$])(?:([A-Z][A-Z0-9_]*)=[^\s\"'$`;&|<>(]|(\w+)\\?[\"']?\s*[:=]\s*\\?[\"'][^\"'\\$\s<>{}]{8,}\\?[\"'])"
)
"""In the text of any file: a shell assignment in capitals, or a quoted literal without spaces."""
SECRET_VALUES = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
    "a token": re.compile(
        r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
        r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    ),
    "an AWS key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "an authorization": re.compile(r"\b(?:[Bb]earer|[Bb]asic) +[A-Za-z0-9._~+/=-]{16,}"),
    "a URL with a password": re.compile(r"://[^/\s:@'\"]*:[^/\s:@'\"$]+@"),
}
"""Shapes of values that are secret under any name."""


def is_secret_name(name: str) -> bool:
    """Return True if a variable or an option of that name holds a secret."""
    plain = name.upper().replace("-", "_")
    return bool(SECRET_NAME.search(plain)) and not PLAIN_NAME.search(plain)


def find_secret_value(text: str) -> str:
    """Return the kind of secret that a value has the shape of, or ""."""
    return next((kind for kind, pattern in SECRET_VALUES.items() if pattern.search(text)), "")


def find_secret_in_command(words: Sequence[str]) -> str:
    """Return the variable or option of a command line that is given a secret, or the kind of value, or ""."""
    text = " ".join(words)
    for pattern in (ASSIGNMENT, OPTION):
        for match in pattern.finditer(text):
            if is_secret_name(match[1]):
                return match[1]
    return find_secret_value(text)


def find_secret(text: str) -> str:
    """Return the first name in a text that is given a secret, or the kind of value, or ""."""
    for match in WRITTEN.finditer(text):
        name = match[1] or match[2]
        if is_secret_name(name):
            return name
    return find_secret_value(text)
