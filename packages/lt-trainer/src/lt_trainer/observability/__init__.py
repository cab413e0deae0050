"""Run logger, throughput, sinks, node monitor, report and live watch."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.observability.run_logger import RESUME_CHECK_FILE as RESUME_CHECK_FILE
    from lt_trainer.observability.run_logger import ComputeCost as ComputeCost
    from lt_trainer.observability.run_logger import NullLogger as NullLogger
    from lt_trainer.observability.run_logger import Rank0Logger as Rank0Logger
    from lt_trainer.observability.setup import check_metrics_options as check_metrics_options
    from lt_trainer.observability.setup import check_run_sinks as check_run_sinks
    from lt_trainer.observability.setup import create_node_monitor as create_node_monitor
    from lt_trainer.observability.setup import open_run_sinks as open_run_sinks
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "run_logger": "RESUME_CHECK_FILE ComputeCost NullLogger Rank0Logger",
            "setup": "check_metrics_options check_run_sinks create_node_monitor open_run_sinks",
        },
    )
