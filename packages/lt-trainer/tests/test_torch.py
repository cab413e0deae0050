"""What engines share on torch's side, without ranks."""

import pytest

torch = pytest.importorskip("torch")

from lt_trainer.torch import LocalShard  # noqa: E402


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize("copies", [1, 2, 3, 5])
def test_ranks_that_hold_the_same_give_each_row_once(rows: int, copies: int) -> None:
    """Also where the rows do not divide by the ranks: a checkpoint would else lack the last ones."""
    local = torch.arange(rows * 2).view(rows, 2)
    whole = torch.full((rows + 10, 2), -1)
    for copy in range(copies):
        part = LocalShard(
            local=local, shape=(rows + 10, 2), offset=(4, 0), n_replicas=copies, replica_index=copy
        ).replica_slice()
        assert (part.n_replicas, part.shape) == (1 if copies > 1 else copies, (rows + 10, 2))
        first, n = part.offset[0], part.local.shape[0]
        assert (whole[first : first + n] == -1).all(), "two ranks give the same rows"
        whole[first : first + n] = part.local
    assert whole.tolist() == [[-1, -1]] * 4 + local.tolist() + [[-1, -1]] * 6
