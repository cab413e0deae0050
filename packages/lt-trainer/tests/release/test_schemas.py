"""What of the schemas' checks needs none of their libraries: contexts that would be fetched, and the model card."""

import json
from pathlib import Path
from typing import Any

import pytest

from lt_trainer.release import croissant, spdx
from lt_trainer.release.schemas import SCHEMAS, find_schema_problems

CARD = '---\nlicense: "mit"\nmodel-index:\n- name: "m"\n  results: []\n---\n\n# m\n'


@pytest.mark.parametrize(("file", "context"), [("croissant.json", croissant.CONTEXT), ("ai.spdx3.json", spdx.CONTEXT)])
def test_no_other_context_reaches_a_library_that_would_fetch_it(file: str, context: Any) -> None:
    other = "http://127.0.0.1:9/context.jsonld"
    nested: Any = {"@context": other}
    for _ in range(20):
        nested = [{"a": nested}]
    for document in (
        {},
        [],
        3,
        {"@context": other},
        {"@context": [context, other]},
        {"@context": context, "@graph": nested},
        {"@context": context, "recordSet": [{"field": [{"@context": {"@import": other}}]}]},
    ):
        problems, notes = SCHEMAS[file].check(json.dumps(document))
        assert len(problems) == 1, document
        assert problems[0].startswith("@context: "), document
        assert notes == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# m\n", "has no front matter"),
        ("---\n---\n# m\n", "its front matter is empty"),
        ("---\n- a\n---\n", "should be a dict"),
        ("---\na: [\n---\n", "expected"),
        ("---\na: *b\n---\n", "undefined alias"),
        ("---\na: " + "[" * 5000 + "\n---\n", "RecursionError"),
        ('---\na: !!python/object/apply:os.system ["true"]\n---\n', "could not determine a constructor"),
        (CARD.replace("results", "result"), "model_index"),
        (CARD.replace('- name: "m"\n  results: []', '  "x"'), "model_index"),
    ],
)
def test_front_matter_that_the_hub_cannot_read(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    problems = [problem for problem in find_schema_problems(tmp_path)[0] if problem.startswith("README.md: ")]
    assert len(problems) == 1
    assert told in problems[0]
    assert problems[0].startswith("README.md: the model card: ")
    (tmp_path / "README.md").write_text(CARD)
    assert not [problem for problem in find_schema_problems(tmp_path)[0] if problem.startswith("README.md")]
