"""Filter of a release's texts: secrets, hosts, home folders and user names become fixed placeholders.

It runs before anything is hashed. What looks like a secret is found by shape (keys, tokens, URLs with a password); host
and user names by the values that the run recorded, as whole words. A secret without a telling shape is not found: a
run's logs, which hold any text, are not released at all. Pure; linear in the text.
"""

import re
from collections.abc import Iterable

HOME, HOST, USER, SECRET, FOLDER = "<home>", "<host>", "<user>", "<secret>", "<folder>"
MIN_LENGTH = 3
"""Shorter names would match any text."""

SECRETS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(
        r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
        r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    ),
    re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    re.compile(r"(?<=[Bb]earer )[A-Za-z0-9._~+/=-]{16,}"),
    re.compile(r"(?<=://)[^/\s:@'\"<>]*:[^/\s:@'\"$<>]+(?=@)"),
    re.compile(r"(?<=[?&]X-Amz-Signature=)[0-9a-fA-F]+|(?<=[?&]sig=)[A-Za-z0-9%+/=]{16,}"),
    re.compile(r"(?i)(?<=[a-z_]password=)[^\s\"'&<>]+|(?<=[a-z_]secret=)[^\s\"'&<>]+|(?<=api_key=)[^\s\"'&<>]+"),
)
HOMES = re.compile(r"(?:/home/[^/\s\"'\\,;:]+|/Users/[^/\s\"'\\,;:]+|(?<![\w.-])/root(?![\w.-]))")
ADDRESSES = re.compile(
    r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
)


class TextFilter:
    """Replaces what must not be published.

    Args:
        hosts: Names of machines.
        users: Names of users.
        folders: Absolute folders of the run, which become `<folder>`; longer ones first.
        homes: Home folders other than those below /home and /Users.
    """

    def __init__(
        self,
        *,
        hosts: Iterable[str] = (),
        users: Iterable[str] = (),
        folders: Iterable[str] = (),
        homes: Iterable[str] = (),
    ) -> None:
        self._rules = [(SECRET, pattern) for pattern in SECRETS]
        for placeholder, names, *patterns in (
            (FOLDER, folders),
            (HOME, homes, HOMES),
            (HOST, hosts, ADDRESSES),
            (USER, users),
        ):
            kept = {re.escape(name.rstrip("/")) for name in names if len(name) >= MIN_LENGTH}
            words = [re.compile(rf"(?<![\w.-]){name}(?![\w-])") for name in sorted(kept, key=len, reverse=True)]
            self._rules += [(placeholder, pattern) for pattern in (*words, *patterns)]

    def apply(self, text: str) -> str:
        """Return the text with placeholders."""
        for placeholder, pattern in self._rules:
            text = pattern.sub(placeholder, text)
        return text
