"""`[parallel]`: how the devices share the work."""

from dataclasses import dataclass

from lt_trainer.fields import check_types, option
from lt_trainer.sections.checks import at_least, wrong


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How the devices share the work: world = tp * pp * cp * dp_replicate * dp_shard."""

    n_nodes: int = option(1, "nodes (machines) of the run", hp="NUM_NODES")
    tp: int = option(1, "tensor parallel degree")
    pp: int = option(1, "pipeline parallel degree")
    cp: int = option(1, "context parallel degree")
    dp_replicate: int = option(1, "replicas of the model, each of them sharded over dp_shard devices")
    dp_shard: int = option(0, "devices that share one copy of weights and optimizer state; 0 = all that remain")
    sequence_parallel: bool = option(False, "split activations along the sequence between tensor parallel blocks")

    def __post_init__(self) -> None:
        check_types(self, "parallel")
        at_least(self, "parallel", 1, "n_nodes", "tp", "pp", "cp", "dp_replicate")
        at_least(self, "parallel", 0, "dp_shard")
        if self.sequence_parallel and self.tp == 1:
            problem = "sequence parallelism has no effect without tensor parallelism"
            remedy = "set parallel.tp above 1 or parallel.sequence_parallel to false"
            raise wrong(self, "parallel", "sequence_parallel tp", problem, remedy)

    def data_parallel(self, world: int) -> int:
        """Ranks that read different rows, out of `world` ranks: dp_replicate * dp_shard.

        Raises:
            RecipeError: the degrees do not make up `world`.
        """
        model_ranks = self.tp * self.pp * self.cp
        fixed = model_ranks * self.dp_replicate * (self.dp_shard or 1)
        if world % fixed or (self.dp_shard and world != fixed):
            wanted = f"{fixed}" if self.dp_shard else f"a multiple of {fixed}"
            problem = f"these degrees need {wanted} ranks, and the run has {world}"
            remedy = f"start {wanted} ranks, or change the degrees (dp_shard = 0 takes what remains)"
            raise wrong(self, "parallel", "tp pp cp dp_replicate dp_shard", problem, remedy)
        return world // model_ranks
