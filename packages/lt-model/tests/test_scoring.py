"""Scores of labels against log_softmax and argmax, chunked, padded and with the vocabulary split."""

import pytest

torch = pytest.importorskip("torch")

from lt_model import IGNORE_INDEX, LabelScores, linear_label_scores  # noqa: E402
from lt_model.loss import linear_loss_parts  # noqa: E402
from lt_model.scoring import vocab_parallel_label_scores  # noqa: E402

N, WIDTH, VOCAB = 23, 6, 11


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for rows in (N, VOCAB))
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    labels = torch.randint(0, VOCAB, (N,), generator=generator)
    labels[::3] = (hidden @ weight.T).argmax(dim=1)[::3]  # some are greedy
    labels[::4] = IGNORE_INDEX
    return hidden, weight, labels


def reference(hidden, weight, labels, softcap=0.0):
    """The definition, on all logits at once."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    counted = labels != IGNORE_INDEX
    log_probs = logits.log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return LabelScores(log_probs * counted, (logits.argmax(dim=-1) == labels) & counted)


def split_scores(function, n_ranks):
    """Run `function(rank, exchange)` for each rank at once; `exchange(kind, tensor)` reduces over them."""
    import threading

    barrier, given, results, errors = threading.Barrier(n_ranks), {}, [None] * n_ranks, []

    def run(rank):
        calls = iter(range(1000))

        def exchange(reduce, *tensors):
            key = next(calls)
            given[key, rank] = tensors
            barrier.wait(30)
            return reduce([given[key, r] for r in range(n_ranks)])

        try:
            results[rank] = function(rank, exchange)
        except BaseException as exc:  # noqa: BLE001 - shown below
            errors.append(exc)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def all_reduce_softmax(all_terms):
    tops, sums, labels = (torch.stack(one) for one in zip(*all_terms, strict=True))
    top = tops.amax(dim=0)
    return top, ((tops - top).exp() * sums).sum(dim=0), labels.sum(dim=0)


@pytest.mark.parametrize("chunk_tokens", [0, 1, 5, 23, 100])
@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 8}, {"pad_to_multiple_of": 8, "softcap": 1.5}])
def test_scores_are_log_softmax_and_argmax(chunk_tokens, options):
    given, softcap = inputs(), options.get("softcap", 0.0)
    found = linear_label_scores(*given, chunk_tokens=chunk_tokens, **options)
    wanted = reference(*given, softcap)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-12, atol=0)
    assert found.is_greedy.tolist() == wanted.is_greedy.tolist()
    assert 3 < found.is_greedy.sum() < N - 3
    hidden, weight = (tensor.requires_grad_() for tensor in given[:2])
    loss = linear_loss_parts(*given, chunk_tokens=chunk_tokens, **options).cross_entropy
    torch.testing.assert_close(-found.log_probs.sum(), loss, rtol=1e-13, atol=0)
    total = linear_loss_parts(*given, chunk_tokens=chunk_tokens, **options).total
    theirs = torch.autograd.grad(-reference(*given, softcap).log_probs.sum(), (hidden, weight))
    for ours, grad in zip(torch.autograd.grad(total, (hidden, weight)), theirs, strict=True):
        torch.testing.assert_close(ours, grad, rtol=1e-12, atol=1e-14)


def test_scores_have_the_shape_of_the_labels_and_fp32_of_bfloat16():
    hidden, weight, labels = inputs(torch.bfloat16)
    found = linear_label_scores(hidden.view(1, N, WIDTH), weight, labels.view(1, N))
    wanted = reference(hidden, weight, labels)
    assert found.log_probs.dtype == torch.float32
    torch.testing.assert_close(found.log_probs, wanted.log_probs.view(1, N), rtol=1e-5, atol=1e-6)
    assert found.is_greedy.shape == (1, N)


@pytest.mark.parametrize(("n_ranks", "softcap"), [(2, 0.0), (3, 0.0), (3, 1.5)])
def test_a_split_vocabulary_gives_the_same_scores_on_every_rank(n_ranks, softcap):
    hidden, weight, labels = inputs()
    bounds = [VOCAB * rank // n_ranks for rank in range(n_ranks + 1)]

    def linear(rank, exchange):
        return linear_label_scores(
            hidden,
            weight[bounds[rank] : bounds[rank + 1]],
            labels,
            vocab_start_index=bounds[rank],
            all_reduce_softmax=lambda *terms: exchange(all_reduce_softmax, *terms),
            chunk_tokens=7,
            softcap=softcap,
        )

    def unchunked(rank, exchange):
        logits = hidden @ weight[bounds[rank] : bounds[rank + 1]].T
        return vocab_parallel_label_scores(
            softcap * (logits / softcap).tanh() if softcap else logits,
            labels,
            vocab_start_index=bounds[rank],
            all_reduce_max=lambda x: exchange(lambda parts: torch.stack([p for (p,) in parts]).amax(dim=0), x),
            all_reduce_sum=lambda x: exchange(lambda parts: sum(p for (p,) in parts), x),
        )

    wanted = reference(hidden, weight, labels, softcap)
    for function in (linear, unchunked):
        for found in split_scores(function, n_ranks):
            torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-12, atol=0)
            assert found.is_greedy.tolist() == wanted.is_greedy.tolist()


def test_of_equal_logits_the_smallest_id_is_greedy():
    weight = torch.ones(5, 2)
    weight[3] = -1
    found = linear_label_scores(torch.ones(5, 2), weight, torch.arange(5))
    assert found.is_greedy.tolist() == [True, False, False, False, False]
    logits = torch.ones(5, 2) @ weight.T
    found = vocab_parallel_label_scores(logits, torch.arange(5), all_reduce_max=lambda x: x)
    assert found.is_greedy.tolist() == [True, False, False, False, False]


def test_a_logit_that_is_no_number_makes_nothing_greedy():
    found = linear_label_scores(torch.full((2, 2), float("nan")), torch.ones(5, 2), torch.tensor([0, 3]))
    assert found.is_greedy.tolist() == [False, False]
    assert found.log_probs.isnan().all()
