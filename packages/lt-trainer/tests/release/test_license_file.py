"""The license file: what it says, and all its mistakes in one list."""

import pytest

from lt_trainer.release.bundle import ReleaseError
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
    assert parsed.stores == {"train": {"prepare": {"text_field": "content"}}}


def test_the_first_pattern_that_matches_a_source_counts() -> None:
    parsed = parse_license_file(FULL, "licences.toml")
    assert parsed.source("corpus/a.jsonl").license == "CC0-1.0"
    assert parsed.source("/data/corpus/a.jsonl").redistribute
    assert parsed.source("notes/a.txt").license == "LicenseRef-ours"
    assert not parsed.source("notes/a.txt").redistribute
    unnamed = parsed.source("other.parquet")
    assert (unnamed.license, unnamed.redistribute) == (None, False), "nothing is invented"


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
        "extra = {}: Extra inputs are not permitted",
        "release.name = 3: Input should be a valid string",
        "release.color = 'red': Extra inputs are not permitted",
        "licenses.data = '': not an SPDX expression",
        "licenses.weights = 'MIT': Extra inputs are not permitted",
        "licenses.components.Model cards = 'Model cards': no such component",
        "sources.0.path: Field required",
        "sources.0.license = '  ': not an SPDX expression",
        "sources.1.license = 'Public, mostly': not an SPDX expression",
        "stores.train.text = 'text': Input should be 'prepare'",
    ):
        assert part in problems, part


def test_what_is_not_toml_is_refused() -> None:
    with pytest.raises(ReleaseError, match="not TOML"):
        parse_license_file("[release", "licences.toml")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"tiny"', '"ti\\nny"', "release.name = 'ti\\nny': has a control character or a line break"),
        ('"tiny"', '"ti\\u001b[31mny"', "release.name = 'ti\\x1b[31mny': has a control character"),
        ('"Grace"', '"Gr\\u202eace"', "release.authors.1 = 'Gr\\u202eace': has a control character"),
        ('"Lab"', '"Lab"\nurl = "javascript:alert(1)"', "release.url = 'javascript:alert(1)': not an address"),
        ('"Lab"', '"Lab"\ntolerance = inf', "release.tolerance = inf: Input should be less than 1"),
        ('"Lab"', '"Lab"\ntolerance = nan', "release.tolerance = nan: Input should be"),
        ('"CC0-1.0"', '"CC0-1.0"\nurl = "x.org"', "sources.0.url = 'x.org': not an address"),
        ('"CC0-1.0"', '"MIT AND"', "sources.0.license = 'MIT AND': not an SPDX expression"),
        ('"CC0-1.0"', '"(MIT"', "sources.0.license = '(MIT': not an SPDX expression"),
        ('"CC0-1.0"', '"MIT Apache-2.0"', "sources.0.license = 'MIT Apache-2.0': not an SPDX"),
        ('"CC0-1.0"', '"WITH"', "sources.0.license = 'WITH': not an SPDX"),
        ('"CC0-1.0"', f'"{"(" * 5000}"', "not an SPDX expression"),
    ],
)
def test_values_that_would_break_a_card_or_are_none_are_refused(old: str, new: str, told: str) -> None:
    with pytest.raises(ReleaseError) as raised:
        parse_license_file(FULL.replace(old, new, 1), "licences.toml")
    (problem,) = raised.value.problems
    assert told in problem


@pytest.mark.parametrize(
    "expression",
    [
        "MIT OR (Apache-2.0 AND BSD-3-Clause)",
        "GPL-2.0-only WITH Classpath-exception-2.0",
        "OpenMDW-1.0 OR MIT",
    ],
)
def test_expressions(expression: str) -> None:
    text = FULL.replace('"CC0-1.0"', f'"{expression}"', 1).replace('"Lab"', '"Lab"\ndescription = "a\\n\\nb"', 1)
    parsed = parse_license_file(text, "licences.toml")
    assert parsed.sources[0].license == expression
    assert parsed.release.description == "a\n\nb"
