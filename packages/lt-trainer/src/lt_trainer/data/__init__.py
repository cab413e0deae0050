"""Training data: stores, mixtures, synthetic rows or a custom loader, as step batches."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.data.batches import Batches as Batches
    from lt_trainer.data.batches import open_batches as open_batches
    from lt_trainer.data.document_boundaries import find_document_starts as find_document_starts
    from lt_trainer.data.document_boundaries import micro_batch_cu_seqlens as micro_batch_cu_seqlens
    from lt_trainer.data.generations import changed_generations as changed_generations
    from lt_trainer.data.generations import recorded_stores as recorded_stores
    from lt_trainer.data.generations import reopen_data as reopen_data
    from lt_trainer.data.generations import resume_state as resume_state
    from lt_trainer.data.synthetic import SyntheticRows as SyntheticRows
    from lt_trainer.data.training_data import STORES as STORES
    from lt_trainer.data.training_data import TrainingData as TrainingData
    from lt_trainer.data.training_data import ValidationSet as ValidationSet
    from lt_trainer.data.training_data import data_event_fields as data_event_fields
    from lt_trainer.data.training_data import open_data as open_data
    from lt_trainer.data.training_data import open_stream as open_stream
    from lt_trainer.data.training_data import text_bytes as text_bytes
    from lt_trainer.data.training_data import to_micro_batches as to_micro_batches
    from lt_trainer.data.training_data import validation_batches as validation_batches
    from lt_trainer.data.training_data import validation_rows as validation_rows
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "batches": "Batches open_batches",
            "document_boundaries": "find_document_starts micro_batch_cu_seqlens",
            "generations": "changed_generations recorded_stores reopen_data resume_state",
            "synthetic": "SyntheticRows",
            "training_data": (
                "STORES TrainingData ValidationSet data_event_fields open_data open_stream text_bytes to_micro_batches "
                "validation_batches validation_rows"
            ),
        },
    )
