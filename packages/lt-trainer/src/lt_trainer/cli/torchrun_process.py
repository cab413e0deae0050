"""torchrun that exits with the code of the first failure: `python -m lt_trainer.cli.torchrun_process`.

torchrun itself exits with 1 for every failure. A rank that was killed by signal n leaves no code behind, so here
torchrun's own record of the first failure gives it: 128 + n. torchrun also stops when the command that started it has
been killed; by itself it would go on.
"""

from __future__ import annotations

import sys

from lt_trainer.resilience import stop_when_launcher_dies


def main() -> int:
    """Run torchrun with the arguments of this process; return its exit code."""
    stop_when_launcher_dies()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main()
    except ChildFailedError as exc:
        sys.stderr.write(f"{exc}\n")
        code = exc.get_first_failure()[1].exitcode
        return code if code >= 0 else 128 - code
    except SignalException as exc:  # the stop that was forwarded; its traceback would follow the ranks' last lines
        return 128 + exc.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
