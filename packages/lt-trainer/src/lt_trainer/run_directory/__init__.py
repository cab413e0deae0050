"""Run directory: files, records, environment of a run."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.run_directory.environment import describe_environment as describe_environment
    from lt_trainer.run_directory.environment import hash_package as hash_package
    from lt_trainer.run_directory.environment import list_package_files as list_package_files
    from lt_trainer.run_directory.evaluation_results import EvaluationResults as EvaluationResults
    from lt_trainer.run_directory.evaluation_results import EvaluationUnit as EvaluationUnit
    from lt_trainer.run_directory.evaluation_results import find_results as find_results
    from lt_trainer.run_directory.evaluation_results import read_results as read_results
    from lt_trainer.run_directory.jsonl import NON_FINITE as NON_FINITE
    from lt_trainer.run_directory.jsonl import JsonlWriter as JsonlWriter
    from lt_trainer.run_directory.jsonl import LogFile as LogFile
    from lt_trainer.run_directory.jsonl import read_jsonl as read_jsonl
    from lt_trainer.run_directory.jsonl import read_last_object as read_last_object
    from lt_trainer.run_directory.rank_log import RankLog as RankLog
    from lt_trainer.run_directory.records import METRIC_DEFINITIONS as METRIC_DEFINITIONS
    from lt_trainer.run_directory.records import EvaluationRecord as EvaluationRecord
    from lt_trainer.run_directory.records import MetricsRecord as MetricsRecord
    from lt_trainer.run_directory.records import StepRecord as StepRecord
    from lt_trainer.run_directory.records import ValidationRecord as ValidationRecord
    from lt_trainer.run_directory.records import drop_superseded_records as drop_superseded_records
    from lt_trainer.run_directory.records import format_record as format_record
    from lt_trainer.run_directory.records import is_first_of_start as is_first_of_start
    from lt_trainer.run_directory.records import record_to_dict as record_to_dict
    from lt_trainer.run_directory.run_dir import RunDir as RunDir
    from lt_trainer.run_directory.run_dir import read_mirror_name as read_mirror_name
    from lt_trainer.run_directory.run_dir import write_atomic as write_atomic
    from lt_trainer.run_directory.typed_records import ENVIRONMENT_FIELDS as ENVIRONMENT_FIELDS
    from lt_trainer.run_directory.typed_records import RECIPE_FIELDS as RECIPE_FIELDS
    from lt_trainer.run_directory.typed_records import Kind as Kind
    from lt_trainer.run_directory.typed_records import event_problem as event_problem
    from lt_trainer.run_directory.typed_records import is_int as is_int
    from lt_trainer.run_directory.typed_records import is_number as is_number
    from lt_trainer.run_directory.typed_records import is_seconds as is_seconds
    from lt_trainer.run_directory.typed_records import is_table as is_table
    from lt_trainer.run_directory.typed_records import is_text as is_text
    from lt_trainer.run_directory.typed_records import read_events as read_events
    from lt_trainer.run_directory.typed_records import read_metrics as read_metrics
    from lt_trainer.run_directory.typed_records import record_problem as record_problem
    from lt_trainer.run_directory.typed_records import sample_problem as sample_problem
    from lt_trainer.run_directory.typed_records import table_problem as table_problem
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "environment": "describe_environment hash_package list_package_files",
            "evaluation_results": "EvaluationResults EvaluationUnit find_results read_results",
            "jsonl": "NON_FINITE JsonlWriter LogFile read_jsonl read_last_object",
            "rank_log": "RankLog",
            "records": (
                "METRIC_DEFINITIONS EvaluationRecord MetricsRecord StepRecord ValidationRecord "
                "drop_superseded_records format_record is_first_of_start record_to_dict"
            ),
            "run_dir": "RunDir read_mirror_name write_atomic",
            "typed_records": (
                "ENVIRONMENT_FIELDS RECIPE_FIELDS Kind event_problem is_int is_number is_seconds is_table is_text "
                "read_events read_metrics record_problem sample_problem table_problem"
            ),
        },
    )
