"""What a run reports, by its old name: records and lines (`records`), JSON lines (`jsonl`), speed (`rates`)."""

from lt_trainer.jsonl import JsonlSink, LogFile, read_jsonl
from lt_trainer.rates import Rates, Throughput
from lt_trainer.records import METRIC_DEFINITIONS, MetricsRecord, ValidationRecord, as_dict, line, newest_way

__all__ = [
    "METRIC_DEFINITIONS",
    "JsonlSink",
    "LogFile",
    "MetricsRecord",
    "Rates",
    "Throughput",
    "ValidationRecord",
    "as_dict",
    "line",
    "newest_way",
    "read_jsonl",
]
