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

# Lint and format what is here, mending what can be mended.
mend:
    uv run --locked ruff check --fix .
    uv run --locked ruff format .

# Types, and who may import whom.
types:
    uv run --locked basedpyright --level error
    uv run --locked lint-imports

# The site of the documentation, built strictly; open OUT/index.html.
site OUT="site":
    uv run --locked mkdocs build --strict --site-dir {{OUT}}

# The packages that a change against BASE can break.
affected BASE="origin/main":
    uv run --locked python tools/affected_packages.py --base {{BASE}}

# One package in an environment of its own: just package lt-data --python 3.14 --resolution lowest-direct
package NAME *OPTIONS:
    uv run --locked python tools/check_package.py {{NAME}} {{OPTIONS}}

# Tests with torch 2.9, the oldest of all packages but lt-trainer-gpu, in the lock's environment of Trainium.
torch-2-9 *PYTEST="packages/lt-data packages/lt-model packages/lt-ckpt packages/lt-trainer packages/lt-trainer-neuron":
    UV_PROJECT_ENVIRONMENT=.venv-torch-2.9 uv sync --locked --python 3.12 --no-group gpu --group neuron
    .venv-torch-2.9/bin/python -m pytest -q -m "not slow" {{PYTEST}}

# Tests with torch 2.11, the oldest of lt-trainer-gpu, or another version; those of compiled models with the slow ones.
older-torch VERSION="2.11":
    UV_PROJECT_ENVIRONMENT=.venv-torch-{{VERSION}} uv sync --locked
    VIRTUAL_ENV=.venv-torch-{{VERSION}} uv pip install "torch=={{VERSION}}.*"
    .venv-torch-{{VERSION}}/bin/python -m pytest -q -m "not slow" packages/lt-model packages/lt-trainer packages/lt-trainer-gpu
    .venv-torch-{{VERSION}}/bin/python -m pytest -q -k compil packages/lt-model/tests packages/lt-trainer-gpu/tests
