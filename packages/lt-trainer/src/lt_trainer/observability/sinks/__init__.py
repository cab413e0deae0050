"""Metrics sinks besides metrics.jsonl: one lazily imported adapter module per library.

A recipe lists them in `metrics.sinks`. A sink whose library is not installed is rejected before the start. One that
fails later is reported once, logged as an event and disabled: an outage of a web service must not stop a run.

A run repeats steps after a rollback or a restart from an older checkpoint. metrics.jsonl keeps every record in writing
order (`lt_trainer.run_directory.records.drop_superseded_records` selects the current ones). TensorBoard drops its
earlier events of these steps. W&B and Trackio are append-only and keep the first record of a step.
"""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.observability.sinks.group import SinkGroup as SinkGroup
    from lt_trainer.observability.sinks.registry import SINKS as SINKS
    from lt_trainer.observability.sinks.registry import check_sinks as check_sinks
    from lt_trainer.observability.sinks.registry import check_sinks_installed as check_sinks_installed
    from lt_trainer.observability.sinks.registry import open_sinks as open_sinks
    from lt_trainer.observability.sinks.sink import RunInfo as RunInfo
    from lt_trainer.observability.sinks.sink import Sink as Sink
    from lt_trainer.observability.sinks.sink import SinkConfigError as SinkConfigError
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "group": "SinkGroup",
            "registry": "SINKS check_sinks check_sinks_installed open_sinks",
            "sink": "RunInfo Sink SinkConfigError",
        },
    )
