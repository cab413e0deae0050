"""Modules of lt-launch stand on each other in one direction, also where an import happens late or for types alone."""

import pytest

grimp = pytest.importorskip("grimp")


def test_no_module_needs_one_that_needs_it() -> None:
    graph = grimp.build_graph("lt_launch")
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert not left, {module: sorted(needs & left.keys()) for module, needs in left.items()}
