"""The license file, and the class of the Model Openness Framework that a release reaches with its licenses."""

import pytest

from lt_trainer.release.bundle import ReleaseError
from lt_trainer.release.license_file import parse_license_file
from lt_trainer.release.mof import COMPONENTS, ReleasedComponent, evaluate_openness, is_open_license

FULL = """
release = {name = "tiny", producer = "Lab"}
licenses.distribution = "OpenMDW-1.0"
licenses.document = "CC-BY-4.0"
licenses.components = {"Model parameters (Final)" = "Apache-2.0"}
sources = [
    {path = "corpus/*.jsonl", license = "CC0-1.0", redistribute = true},
    {path = "*.txt", license = "LicenseRef-ours"},
]
stores.train.prepare = {text_field = "content"}
"""
LICENSES = {"code": "Apache-2.0", "data": "CDLA-Permissive-2.0", "document": "CC-BY-4.0"}


def test_the_most_specific_line_and_the_first_pattern_count() -> None:
    parsed = parse_license_file(FULL, "licences.toml")
    names = ("Model parameters (Final)", "Model card", "Model metadata")
    assert [parsed.component_license(name) for name in names] == ["Apache-2.0", "CC-BY-4.0", "OpenMDW-1.0"]
    assert parsed.source("/data/corpus/a.jsonl").redistribute
    notes, unnamed = parsed.source("notes/a.txt"), parsed.source("other.parquet")
    assert (notes.license, notes.redistribute) == ("LicenseRef-ours", False)
    assert (unnamed.license, unnamed.redistribute) == (None, False), "nothing is invented"


def test_all_mistakes_are_in_one_list() -> None:
    changes = {
        **{'producer = "Lab"': 'color = "red"', '"OpenMDW-1.0"': '""', "text_field": "text"},
        **{'"Model parameters (Final)"': '"Model cards"', '"CC0-1.0"': '"Public, mostly"'},
    }
    text = FULL
    for old, new in changes.items():
        text = text.replace(old, new)
    with pytest.raises(ReleaseError) as raised:
        parse_license_file(text, "licences.toml")
    assert raised.value.exit_code == 64
    assert sorted(problem.split(";")[0] for problem in raised.value.problems) == [
        'licenses.components.Model cards = "Model cards": no such component',
        'licenses.distribution = "": not an SPDX expression',
        'release.color = "red": Extra inputs are not permitted',
        "release.producer: Field required",
        'sources.0.license = "Public, mostly": not an SPDX expression',
        "stores.train.prepare.text = \"text\": Input should be 'text_field', 'tokens_field', 'on_bad', "
        "'max_document_bytes' or 'unit_bytes'",
    ]


def test_expressions_of_licenses() -> None:
    is_open = ("MIT", "MIT OR LicenseRef-x", "OpenMDW-1.0 OR MIT", "(MIT OR Apache-2.0) AND CC0-1.0")
    is_not = ("MIT AND LicenseRef-x", "(MIT OR LicenseRef-x) AND CC0-1.0", "GPL-2.0-only WITH Classpath-exception-2.0")
    for expression in (*is_open, *is_not):
        parsed = parse_license_file(FULL.replace("CC0-1.0", expression), "licences.toml")
        assert parsed.sources[0].license == expression
        assert is_open_license(expression) is (expression in is_open)


def components(class_number: int, *without: str) -> list[ReleasedComponent]:
    """All components that a class needs, but for some."""
    return [
        ReleasedComponent(name=name, license=LICENSES[part.content], paths=(name,))
        for name, part in COMPONENTS.items()
        if part.is_required and part.class_number >= class_number and name not in without
    ]


@pytest.mark.parametrize(("number", "count"), [(1, 14), (2, 10), (3, 6)])
def test_a_class_is_reached_with_all_that_it_needs_and_not_without_one(number: int, count: int) -> None:
    assert len(COMPONENTS) == 17
    result = evaluate_openness(components(number))
    assert (result.class_number, result.missing[number], len(components(number))) == (number, (), count)
    for part in components(number):
        if part.name == "Technical report" and number == 1:
            continue  # the paper stands in for it
        result = evaluate_openness(components(number, part.name))
        assert result.class_number not in range(1, number + 1)
        assert f"{part.name}: not in the release" in result.missing[number]


def test_a_paper_takes_the_place_of_the_report_in_every_class() -> None:
    assert evaluate_openness(components(1, "Technical report")).class_number == 1
    paper = ReleasedComponent(name="Research paper", license="CC-BY-4.0", paths=("p",))
    assert evaluate_openness([*components(3, "Technical report"), paper]).class_number == 3


@pytest.mark.parametrize(("name", "number", "reached"), [("Model parameters (Final)", 3, 0), ("Datasets", 1, 2)])
def test_a_component_without_an_open_license_does_not_count(name: str, number: int, reached: int) -> None:
    for license_, lacks, reason in (
        ("", "", "has no license"),
        ("CC-BY-NC-4.0", "", "CC-BY-NC-4.0 is not a license that counts as open"),
        ("CC0-1.0", "source x has no license", "source x has no license"),
    ):
        part = ReleasedComponent(name=name, license=license_, paths=("x",), missing=lacks)
        result = evaluate_openness([*components(1, name), part])
        assert (result.class_number, result.missing[number]) == (reached, (f"{name}: {reason}",))
