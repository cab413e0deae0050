# The one list of commands. `just` shows it (pip install rust-just, or run what stands below a name by hand).

[private]
default:
    @just --list --unsorted

# Everything that must hold for a commit: lint, format, types, layers, tests. Arguments narrow the tests.
check *PYTEST:
    uv run --locked python tools/check.py {{PYTEST}}

# What the test command leaves out: full counts, compilation, big shapes.
slow *PYTEST:
    uv run --locked python tools/slow.py {{PYTEST}}

# Whether the tests notice 200 planted mistakes; before it, once: uv run python tools/mutants/cover.py
mutants *OPTIONS:
    uv run --locked python tools/mutants/run.py {{OPTIONS}}

# Tests with torch 2.9, 2.11 and 2.14, in environments under OUT: just older-torch /tmp/torch --torch 2.11
older-torch OUT *OPTIONS:
    uv run --locked python tools/older_torch.py {{OUT}} {{OPTIONS}}

# Lint and format what is here, mending what can be mended.
mend:
    uv run --locked ruff check --fix .
    uv run --locked ruff format .

# Types, and who may import whom.
types:
    uv run --locked basedpyright --level error
    uv run --locked lint-imports

# Ranges between packages, declared imports, public names, generated pictures and tables.
packages:
    uv run --locked python tools/check_ranges.py
    uv run --locked python tools/check_dependencies.py
    uv run --locked python tools/api_surface.py
    uv run --locked python tools/architecture_diagram.py
    uv run --locked python tools/recipe_page.py
    uv run --locked python tools/option_effects.py

# Write the frozen lists of public names, the pictures and the tables anew; look at the diff.
refresh:
    uv run --locked python tools/api_surface.py --write
    uv run --locked python tools/architecture_diagram.py --write
    uv run --locked python tools/recipe_page.py --write
    uv run --locked python tools/option_effects.py --write
    uv run --locked python tools/guarantees.py --write

# The site of the documentation, built strictly; open OUT/index.html.
site OUT="site":
    uv run --locked mkdocs build --strict --site-dir {{OUT}}

# Plant for each option that it is ignored; the test that shows its effect must notice.
ignored-options *OPTIONS:
    uv run --locked python tools/plant_ignored_options.py {{OPTIONS}}

# What a change against BASE has to run, and whether the changelogs tell of it.
affected BASE="origin/main":
    uv run --locked python tools/affected_packages.py --base {{BASE}}
    uv run --locked python tools/changelog.py --base {{BASE}}

# One package in an environment of its own: just package lt-data /tmp/x --python 3.14 --resolution highest
package NAME OUT *OPTIONS:
    uv run --locked python tools/check_package.py {{NAME}} --out {{OUT}} {{OPTIONS}}

# Wheel and sdist of one package, each tried alone.
artifacts NAME OUT:
    uv run --locked python tools/artifacts.py {{NAME}} --out {{OUT}}

# Prepare a release: just release lt-data minor
release NAME MOVE *OPTIONS:
    uv run --locked python tools/release.py {{NAME}} {{MOVE}} {{OPTIONS}}
