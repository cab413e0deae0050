"""`[parallel]`: parallel degrees."""

from dataclasses import dataclass

from lt_trainer.config.fields import check_types, option
from lt_trainer.config.sections.validators import field_error, require_at_least


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallel degrees: world size = tp * pp * cp * dp_replicate * dp_shard."""

    n_nodes: int = option(1, "nodes (machines)", hyperparameter="NUM_NODES")
    tp: int = option(1, "tensor-parallel degree")
    pp: int = option(1, "pipeline-parallel degree")
    cp: int = option(1, "context-parallel degree")
    dp_replicate: int = option(1, "model replicas, each sharded over dp_shard devices")
    dp_shard: int = option(0, "devices that share weights and optimizer state; 0 = all remaining")
    sequence_parallel: bool = option(False, "shard activations along the sequence between tensor-parallel blocks")

    def __post_init__(self) -> None:
        check_types(self, "parallel")
        require_at_least(self, "parallel", 1, "n_nodes", "tp", "pp", "cp", "dp_replicate")
        require_at_least(self, "parallel", 0, "dp_shard")
        if self.sequence_parallel and self.tp == 1:
            problem = "sequence parallelism has no effect without tensor parallelism"
            remedy = "set parallel.tp above 1 or parallel.sequence_parallel to false"
            raise field_error(self, "parallel", "sequence_parallel tp", problem, remedy)

    def data_parallel_size(self, world: int) -> int:
        """Return the number of data-parallel ranks, dp_replicate * dp_shard, out of `world` ranks.

        Raises:
            RecipeError: the degrees do not multiply to `world`.
        """
        model_ranks = self.tp * self.pp * self.cp
        fixed = model_ranks * self.dp_replicate * (self.dp_shard or 1)
        if world % fixed or (self.dp_shard and world != fixed):
            wanted = f"{fixed}" if self.dp_shard else f"a multiple of {fixed}"
            problem = f"these degrees need {wanted} ranks, the run has {world}"
            remedy = f"start {wanted} ranks, or change the degrees (dp_shard = 0 uses all remaining)"
            raise field_error(self, "parallel", "tp pp cp dp_replicate dp_shard", problem, remedy)
        return world // model_ranks
