"""torchrun that exits with the code of the first failure: `python -P -m lt_trainer.cli.torchrun_process`.

torchrun itself exits with 1 for every failure. A rank that was killed by signal n leaves no code behind, so here
torchrun's own record of the failures gives it: 128 + n, and 75 for SIGALRM, by which the kernel ends a rank that hangs
(`resilience.watchdog`). Machines that do not meet are a reason to try again. torchrun also stops when the command that
started it has been killed; by itself it would go on.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lt_trainer.cli.torchrun import EXIT_CODES_VARIABLE, read_exit_codes, write_exit_code
from lt_trainer.constants import EXIT_REQUEUE
from lt_trainer.resilience.launcher_watch import stop_when_launcher_dies


def main() -> int:
    """Run torchrun with the arguments of this process; return its exit code."""
    stop_when_launcher_dies()
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        run.main()
    except ChildFailedError as exc:
        sys.stderr.write(f"{exc}\n")
        codes = {rank: exit_code(failure.exitcode) for rank, failure in exc.failures.items()}
        for rank in codes.keys() - read_exit_codes(Path(os.environ[EXIT_CODES_VARIABLE])).keys():
            write_exit_code(codes[rank], os.environ | {"RANK": str(rank)})
        return codes[exc.get_first_failure()[0]]
    except SignalException as exc:  # the stop that was forwarded; its traceback would follow the ranks' last lines
        return 128 + exc.sigval
    except (DistError, RendezvousError) as exc:
        sys.stderr.write(f"error: the machines of this run did not meet: {exc}; rerun to try again\n")
        return EXIT_REQUEUE
    return 0


def exit_code(code: int) -> int:
    """Return the exit code of a rank: 128 + n for signal n, 75 for SIGALRM.

    Example:
        >>> [exit_code(code) for code in (1, -9, -14)]
        [1, 137, 75]
    """
    return EXIT_REQUEUE if code == -signal.SIGALRM else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
