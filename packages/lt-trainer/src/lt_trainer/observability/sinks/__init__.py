"""Metrics sinks besides metrics.jsonl: one lazily imported adapter module per library.

A recipe lists them in `metrics.sinks`. A sink whose library is not installed is rejected before the start. One that
fails later is reported once, logged as an event and disabled: an outage of a web service must not stop a run.

A run repeats steps after a rollback or a restart from an older checkpoint. metrics.jsonl keeps every record in writing
order (`lt_trainer.run_directory.records.drop_superseded_records` selects the current ones). TensorBoard drops its
earlier events of these steps. W&B and Trackio are append-only and keep the first record of a step.
"""
