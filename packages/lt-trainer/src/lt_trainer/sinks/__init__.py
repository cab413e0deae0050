"""Where a run's records go besides metrics.jsonl: one adapter module per library, none of them loaded unless asked for.

A recipe names them in `metrics.sinks`. A sink whose library is missing is refused before anything starts. One that
fails later is told once, noted as an event and left out from then on: a run of weeks does not end because a web
service does.

What is written again: a run that goes back, or is started anew behind an older checkpoint, repeats steps. metrics.jsonl
keeps every record in the order of writing (`lt_trainer.records.newest_way` picks those that count). TensorBoard is told
to forget what it has of these steps. W&B and Trackio cannot take anything back and keep the first record of a step.
"""

from lt_trainer.sinks.fan import Sinks
from lt_trainer.sinks.opening import SINKS, open_sinks, require_sinks
from lt_trainer.sinks.sink import Sink

__all__ = ["SINKS", "Sink", "Sinks", "open_sinks", "require_sinks"]
