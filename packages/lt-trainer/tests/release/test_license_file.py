"""The license file: what it says, and all its mistakes in one list."""

import pytest

from lt_trainer.release.errors import ReleaseError
from lt_trainer.release.license_file import LicenseFile, parse_license_file

FULL = """
[release]
name = "tiny"
producer = "Lab"
authors = ["Ada", "Grace"]

[licenses]
distribution = "OpenMDW-1.0"
document = "CC-BY-4.0"

[licenses.components]
"Model parameters (Final)" = "Apache-2.0"

[[sources]]
path = "corpus/*.jsonl"
license = "CC0-1.0"
redistribute = true

[[sources]]
path = "*.txt"
license = "LicenseRef-ours"

[stores.train.prepare]
text_field = "content"
"""


def test_the_most_specific_line_is_the_license_of_a_component() -> None:
    parsed = parse_license_file(FULL, "licences.toml")
    assert parsed.release.authors == ("Ada", "Grace")
    assert parsed.component_license("Model parameters (Final)") == "Apache-2.0"
    assert parsed.component_license("Model card") == "CC-BY-4.0"
    assert parsed.component_license("Model metadata") == "OpenMDW-1.0"
    assert LicenseFile().component_license("Model card") == ""
    assert parsed.prepare == {"train": {"text_field": "content"}}


def test_the_first_pattern_that_matches_a_source_counts() -> None:
    parsed = parse_license_file(FULL, "licences.toml")
    assert parsed.source("corpus/a.jsonl").license == "CC0-1.0"
    assert parsed.source("/data/corpus/a.jsonl").redistribute
    assert parsed.source("notes/a.txt").license == "LicenseRef-ours"
    assert not parsed.source("notes/a.txt").redistribute
    unnamed = parsed.source("other.parquet")
    assert (unnamed.path, unnamed.license, unnamed.redistribute) == ("other.parquet", "", False), "nothing is invented"


def test_all_mistakes_are_in_one_list() -> None:
    text = """
[release]
name = 3
color = "red"

[licenses]
data = ""
weights = "MIT"

[licenses.components]
"Model cards" = "MIT"

[[sources]]
license = "  "

[[sources]]
path = "a"
license = "Public, mostly"

[stores.train]
text = "x"

[extra]
"""
    with pytest.raises(ReleaseError) as raised:
        parse_license_file(text, "licences.toml")
    problems = "\n".join(raised.value.problems)
    assert raised.value.exit_code == 64
    for part in (
        "extra: no such table",
        "release.name = 3: must be str",
        "release.color: no such line",
        "licenses.data = '': must not be empty",
        "licenses.weights: no such line",
        "licenses.components.Model cards: no such component",
        "sources[0].path: missing",
        "sources[0].license = '  ': must not be empty",
        "sources[1].license = 'Public, mostly': not an SPDX expression",
        "stores.train: has a table `prepare` and nothing else",
    ):
        assert part in problems, part


def test_what_is_not_toml_is_refused() -> None:
    with pytest.raises(ReleaseError, match="not TOML"):
        parse_license_file("[release", "licences.toml")
