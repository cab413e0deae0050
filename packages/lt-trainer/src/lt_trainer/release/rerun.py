"""Run of a recipe on several ranks of this machine, in the environment that reproduces a release.

    python -m lt_trainer.release.rerun RECIPE RANKS [OPTION...]

As `lt train torchrun`, which keeps the exit codes of the ranks, with options of `lt train run`.
"""

import sys

from lt_trainer.cli.torchrun import run_torchrun
from lt_trainer.config.recipe import load


def main() -> int:
    """Run the command line; return the exit code of the ranks."""
    _, recipe, ranks, *options = sys.argv
    return run_torchrun(load(recipe).recipe, int(ranks), [], ["run", recipe, *options])


if __name__ == "__main__":
    sys.exit(main())
