"""An embedding whose rows are on several ranks: each gives its own ids, and the sum is the whole table's."""

import pytest

torch = pytest.importorskip("torch")

from lt_model.decoder import vocab_parallel_embedding  # noqa: E402


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_every_id_is_looked_up_on_the_one_rank_that_has_it(n_ranks):
    table = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shards = [table.clone().requires_grad_() for table in table.chunk(n_ranks)]
    ids = torch.arange(12).flip(0).view(2, 6)  # first and last row of every shard, and the ids beside them
    parts = [vocab_parallel_embedding(ids, shard, rank * len(shard)) for rank, shard in enumerate(shards)]
    assert torch.equal(sum(parts), table[ids])
    assert [int(part.ne(0).any(-1).sum()) for part in parts] == [12 // n_ranks] * n_ranks
    sum(parts).sum().backward()
    assert all(torch.equal(shard.grad, torch.ones_like(shard)) for shard in shards)
