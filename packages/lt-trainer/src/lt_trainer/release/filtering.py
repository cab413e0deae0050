"""Filter of a bundle's texts: secrets, hosts, home folders and user names become fixed placeholders.

It runs before anything is hashed. What looks like a secret is found by shape (keys, tokens, URLs with a password); host
and user names by the values that the run recorded, as whole words. A secret without a telling shape is not found: a
run's logs, which hold any text, are not released at all. Counts by kind are kept for the bundle's FILTERED.md; the
values are not. Pure; linear in the text.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

HOME, HOST, USER, SECRET, FOLDER = "<home>", "<host>", "<user>", "<secret>", "<folder>"
PLACEHOLDERS = {
    HOME: "home folder",
    HOST: "name or address of a machine",
    USER: "user name",
    SECRET: "value that looks like a secret",
    FOLDER: "folder of the run on the machine that trained",
}

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
ADDRESSES = re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])")
LOOPBACK = "127."
MIN_WORD = 2
"""Shorter names of hosts and users are not replaced: they would match any text."""


def find_secrets(text: str) -> int:
    """Return how many parts of a text look like secrets."""
    return sum(len(pattern.findall(text)) for pattern in SECRETS)


class TextFilter:
    """Replaces what must not be published, and counts it.

    Args:
        hosts: Names of machines.
        users: Names of users.
        folders: Absolute folders of the run, which become `<folder>`; longer ones first.
        homes: Home folders other than those below /home and /Users.

    Attributes:
        counts: Placeholder → number of replacements so far.
    """

    def __init__(
        self,
        *,
        hosts: Iterable[str] = (),
        users: Iterable[str] = (),
        folders: Sequence[str] = (),
        homes: Iterable[str] = (),
    ) -> None:
        self.counts: Counter[str] = Counter()
        exact = sorted({text.rstrip("/") for text in folders if len(text) > MIN_WORD}, key=len, reverse=True)
        self._rules: list[tuple[str, re.Pattern[str]]] = [(SECRET, pattern) for pattern in SECRETS]
        self._rules += [(FOLDER, _folder(text)) for text in exact]
        others = sorted({text.rstrip("/") for text in homes}, key=len, reverse=True)
        self._rules += [(HOME, _folder(text)) for text in others if len(text) > MIN_WORD]
        self._rules.append((HOME, HOMES))
        self._rules += [
            (HOST, _word(name)) for name in sorted(set(hosts), key=len, reverse=True) if len(name) >= MIN_WORD
        ]
        self._rules += [
            (USER, _word(name)) for name in sorted(set(users), key=len, reverse=True) if len(name) > MIN_WORD
        ]

    def apply(self, text: str) -> str:
        """Return the text with placeholders."""
        for placeholder, pattern in self._rules:
            text, number = pattern.subn(placeholder, text)
            self.counts[placeholder] += number
        return ADDRESSES.sub(self._address, text)

    def _address(self, match: re.Match[str]) -> str:
        if match[0].startswith(LOOPBACK) or match[0] == "0.0.0.0":
            return match[0]
        self.counts[HOST] += 1
        return HOST


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")


def _folder(path: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(path)}(?![\w.-])")
