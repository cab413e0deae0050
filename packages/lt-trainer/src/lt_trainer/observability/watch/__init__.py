"""`lt train watch RUN`: live terminal view of a run from the files in its run directory.

`follower` follows the files and returns a view; `terminal` renders it with rich. The run may be on another machine, or
have ended.
"""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.observability.watch.follower import RunWatcher as RunWatcher
    from lt_trainer.observability.watch.terminal import watch_run as watch_run
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "follower": "RunWatcher",
            "terminal": "watch_run",
        },
    )
