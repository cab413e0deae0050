"""Classes of the Model Openness Framework: what each needs, and what does not count."""

import pytest

from lt_trainer.release.mof import COMPONENTS, ReleasedComponent, evaluate_openness, is_open_license

LICENSES = {"code": "Apache-2.0", "data": "CDLA-Permissive-2.0", "document": "CC-BY-4.0"}


def components(class_number: int, *without: str) -> list[ReleasedComponent]:
    """All components that a class needs, but for some."""
    return [
        ReleasedComponent(name=name, license=LICENSES[part.content], paths=(name,))
        for name, part in COMPONENTS.items()
        if part.is_required and part.class_number >= class_number and name not in without
    ]


def test_the_framework_has_seventeen_components() -> None:
    assert len(COMPONENTS) == 17
    required = [sum(p.is_required and p.class_number == number for p in COMPONENTS.values()) for number in (3, 2, 1)]
    assert required == [6, 4, 4]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_class_is_reached_with_all_that_it_needs(number: int) -> None:
    result = evaluate_openness(components(number))
    assert result.class_number == number
    assert result.missing[number] == ()
    assert result.remarks == ()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_without_any_one_component_the_class_is_not_reached(number: int) -> None:
    for part in components(number):
        if part.name == "Technical report" and number == 1:
            continue  # the paper stands in for it
        result = evaluate_openness(components(number, part.name))
        assert result.class_number != number
        assert any(text.startswith(f"{part.name}: ") for text in result.missing[number]), part.name


def test_a_paper_takes_the_place_of_the_report_in_every_class() -> None:
    assert evaluate_openness(components(1, "Technical report")).class_number == 1
    paper = ReleasedComponent(name="Research paper", license="CC-BY-4.0", paths=("p",))
    assert evaluate_openness([*components(3, "Technical report"), paper]).class_number == 3
    assert evaluate_openness(components(3, "Technical report")).class_number == 0


def test_a_higher_class_needs_the_lower_ones() -> None:
    result = evaluate_openness(components(1, "Model card"))
    assert result.class_number == 0
    assert result.missing[2] == ("Model card: not in the release",)


@pytest.mark.parametrize(
    ("license_name", "reason"),
    [
        ("", "has no license"),
        ("CC-BY-NC-4.0", "CC-BY-NC-4.0 is not a license that counts as open"),
        ("LicenseRef-mine", "LicenseRef-mine is not a license that counts as open"),
    ],
)
def test_a_component_without_an_open_license_does_not_count(license_name: str, reason: str) -> None:
    weights = ReleasedComponent(name="Model parameters (Final)", license=license_name, paths=("model",))
    result = evaluate_openness([*components(3, "Model parameters (Final)"), weights])
    assert result.class_number == 0
    assert result.missing[3] == (f"Model parameters (Final): {reason}",)


def test_what_a_component_lacks_beside_its_license_is_named() -> None:
    data = ReleasedComponent(name="Datasets", license="CC0-1.0", paths=("data",), missing="source x has no license")
    result = evaluate_openness([*components(1, "Datasets"), data])
    assert result.class_number == 2
    assert result.missing[1] == ("Datasets: source x has no license",)


def test_an_open_license_for_another_kind_counts_and_is_noted() -> None:
    weights = ReleasedComponent(name="Model parameters (Final)", license="MIT", paths=("model",))
    result = evaluate_openness([*components(3, "Model parameters (Final)"), weights])
    assert result.class_number == 3
    assert result.remarks == ("Model parameters (Final): MIT is an open license, but not made for data",)
    for_all = ReleasedComponent(name="Model parameters (Final)", license="OpenMDW-1.0", paths=("model",))
    assert evaluate_openness([*components(3, "Model parameters (Final)"), for_all]).remarks == ()


@pytest.mark.parametrize(
    ("expression", "is_open"),
    [
        ("MIT", True),
        ("MIT OR LicenseRef-mine", True),
        ("MIT AND LicenseRef-mine", False),
        ("CC0-1.0 AND CC-BY-4.0", True),
        ("(MIT OR Apache-2.0) AND CC0-1.0", True),
        ("(MIT OR LicenseRef-mine) AND CC0-1.0", False),
        ("", False),
        ("mit", False),
    ],
)
def test_expressions_of_several_licenses(expression: str, is_open: bool) -> None:
    assert is_open_license(expression) is is_open
