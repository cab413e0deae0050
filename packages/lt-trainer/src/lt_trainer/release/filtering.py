"""Filter of a release's texts: secrets, hosts, home folders and user names become fixed placeholders.

It runs before anything is hashed. What looks like a secret is found by shape (keys, tokens, URLs with a password); host
and user names by the values that the run recorded, as whole words. A secret without a telling shape is not found: a
run's logs, which hold any text, are not released at all. Counts by kind are kept; the
values are not. Pure; linear in the text.
"""

import re
from collections import Counter
from collections.abc import Iterable

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
ADDRESSES = re.compile(
    r"(?<![\w.])(?!127\.|0\.0\.0\.0)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.])"
)


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
        folders: Iterable[str] = (),
        homes: Iterable[str] = (),
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rules = [(SECRET, pattern) for pattern in SECRETS]
        self._rules += [(FOLDER, _path(path)) for path in _longest_first(folders, 3)]
        self._rules += [*((HOME, _path(path)) for path in _longest_first(homes, 3)), (HOME, HOMES)]
        self._rules += [*((HOST, _word(name)) for name in _longest_first(hosts, 2)), (HOST, ADDRESSES)]
        self._rules += [(USER, _word(name)) for name in _longest_first(users, 3)]

    def apply(self, text: str) -> str:
        """Return the text with placeholders."""
        for placeholder, pattern in self._rules:
            text, number = pattern.subn(placeholder, text)
            self.counts[placeholder] += number
        return text


def _longest_first(names: Iterable[str], min_length: int) -> list[str]:
    """Return names without shorter ones, which would match any text."""
    kept = {name.rstrip("/") for name in names if len(name) >= min_length}
    return sorted(kept, key=len, reverse=True)


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")


def _path(path: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.-]){re.escape(path)}(?![\w.-])")
