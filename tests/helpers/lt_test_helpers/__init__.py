"""Helpers shared by the tests of all packages; on the path by `pythonpath` in the root pyproject.toml."""
