"""Watchdog, heartbeats, stop signals and rank synchronization."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.resilience.heartbeat import decode_heartbeat as decode_heartbeat
    from lt_trainer.resilience.launcher_watch import LAUNCHED_VARIABLE as LAUNCHED_VARIABLE
    from lt_trainer.resilience.launcher_watch import stop_when_launcher_dies as stop_when_launcher_dies
    from lt_trainer.resilience.rank_sync import read_on_all_ranks as read_on_all_ranks
    from lt_trainer.resilience.rank_sync import run_on_all_ranks as run_on_all_ranks
    from lt_trainer.resilience.rank_sync import run_on_rank0 as run_on_rank0
    from lt_trainer.resilience.rank_sync import run_with_keepalive as run_with_keepalive
    from lt_trainer.resilience.stop_signals import STOP_SIGNALS as STOP_SIGNALS
    from lt_trainer.resilience.stop_signals import StopSignals as StopSignals
    from lt_trainer.resilience.stop_signals import ignore_stop_signals as ignore_stop_signals
    from lt_trainer.resilience.stop_signals import install_handlers as install_handlers
    from lt_trainer.resilience.stop_signals import process_stop_signals as process_stop_signals
    from lt_trainer.resilience.stop_signals import release_stop_signals as release_stop_signals
    from lt_trainer.resilience.stop_signals import restore_handlers as restore_handlers
    from lt_trainer.resilience.watchdog import Watchdog as Watchdog
    from lt_trainer.resilience.watchdog import heartbeat_path as heartbeat_path
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "heartbeat": "decode_heartbeat",
            "launcher_watch": "LAUNCHED_VARIABLE stop_when_launcher_dies",
            "rank_sync": "read_on_all_ranks run_on_all_ranks run_on_rank0 run_with_keepalive",
            "stop_signals": (
                "STOP_SIGNALS StopSignals ignore_stop_signals install_handlers process_stop_signals "
                "release_stop_signals restore_handlers"
            ),
            "watchdog": "Watchdog heartbeat_path",
        },
    )
