"""Our scores against lm-evaluation-harness's own Hugging Face model, item by item, through the real harness.

The tasks are of the kinds of HellaSwag, ARC, PIQA (multiple choice), LAMBADA (a target's log-likelihood), wikitext
(whole texts, longer than a row) and of generation up to a stop string; their documents are made here, so that no
network is needed. The harness is no part of the workspace's environment:

    uv run --with 'lm-eval>=0.4.13' --with accelerate python tools/slow.py packages/lt-trainer/tests/test_lm_eval.py
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from lt_trainer.cli.evaluate import EvaluateOptions, evaluate  # noqa: E402
from lt_trainer.cli.lm_eval_adapter import HarnessModel  # noqa: E402
from lt_trainer.evaluation.generated_tasks import GENERATED_TASKS  # noqa: E402
from lt_trainer.evaluation.local_model import load_model  # noqa: E402
from lt_trainer.evaluation.scorer import BatchShape, EvaluationError  # noqa: E402
from lt_trainer.run_directory.jsonl import read_jsonl  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the harness and its libraries are theirs
]

SEQ_LEN, N_ITEMS = 64, 25
YAML = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {output_type}
doc_to_text: "{{{{context}}}}"
{more}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{label}}"\ntarget_delimiter: "%s"\nmetric_list:\n'
CHOICES += "  - metric: acc\n  - metric: acc_norm\n"
KINDS: dict[str, tuple[str, str]] = {
    "like_hellaswag": ("multiple_choice", CHOICES % ""),
    "like_arc": ("multiple_choice", CHOICES % ""),
    "like_piqa": ("multiple_choice", CHOICES % " "),
    "like_lambada": (
        "loglikelihood",
        'doc_to_target: "{{target}}"\ntarget_delimiter: ""\nmetric_list:\n  - metric: acc\n  - metric: perplexity\n',
    ),
    "like_wikitext": (
        "loglikelihood_rolling",
        'doc_to_target: "{{text}}"\nmetric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte\n',
    ),
    "like_gsm8k": (
        "generate_until",
        'doc_to_target: "{{target}}"\ngeneration_kwargs:\n  until: [" a", "\\n"]\n  do_sample: false\n'
        "  max_gen_toks: 40\nmetric_list:\n  - metric: exact_match\n",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, little_data: Path) -> Path:
    """Task files of the harness, with their documents."""
    folder, rng = tmp_path_factory.mktemp("harness"), random.Random(0)
    texts = [path.read_text() for path in sorted((little_data / "text-validation").iterdir())]
    piqa = [{"context": "", "choices": [f"{a} river", f"{a} stone"], "label": 0} for a in ("the", "a", "alpha beta")]
    documents: dict[str, list[dict[str, Any]]] = {
        "like_hellaswag": GENERATED_TASKS["lt_copy"]()[:N_ITEMS],
        "like_arc": GENERATED_TASKS["lt_count"]()[:N_ITEMS],
        "like_piqa": [*GENERATED_TASKS["lt_pattern"]()[: N_ITEMS - 3], *piqa],
        "like_lambada": GENERATED_TASKS["lt_recall"]()[:N_ITEMS],
        "like_wikitext": [{"context": "", "text": text} for text in [*texts, "alpha"]],
        "like_gsm8k": [{"context": " ".join(rng.sample(texts[0].split(), 5)), "target": "x"} for _ in range(6)],
    }
    for name, (output_type, more) in KINDS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        text = YAML.format(name=name, data=data, output_type=output_type, more=more)
        (folder / f"{name}.yaml").write_text(text)
    return folder


def samples_of(model: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
    manager = TaskManager(include_path=str(folder))
    found = simple_evaluate(model=model, tasks=list(KINDS), task_manager=manager, bootstrap_iters=0, log_samples=True)
    assert found is not None
    return {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in KINDS}


@pytest.fixture(scope="module")
def both(model: Path, folder: Path) -> tuple[dict[str, list[dict[str, Any]]], ...]:
    """Samples of all tasks by our model and by the harness's own."""
    shape = BatchShape(micro_batch_size=3, seq_len=SEQ_LEN)
    ours = HarnessModel(load_model(model, device="cpu", dtype="float32"), shape)
    theirs = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=4, max_length=SEQ_LEN)
    return samples_of(ours, folder), samples_of(theirs, folder)


def number_and_flag(response: Any) -> tuple[float, bool | None]:
    """Log-likelihood and greedy flag, which a rolling log-likelihood lacks."""
    if isinstance(response, list | tuple):
        return float(response[0]), str(response[1]) == "True"
    return float(response), None


@pytest.mark.parametrize("name", [name for name, (kind, _) in KINDS.items() if kind != "generate_until"])
def test_log_likelihoods_are_those_of_the_harness_item_by_item(both: Any, name: str) -> None:
    ours, theirs = (samples[name] for samples in both)
    assert len(ours) == len(theirs) > 5
    largest = max(abs(number_and_flag(one)[0]) for our in ours for one in our["filtered_resps"])
    assert largest > 1, "numbers to compare"
    for our, their in zip(ours, theirs, strict=True):
        assert our["doc"] == their["doc"]
        for one, other in zip(our["filtered_resps"], their["filtered_resps"], strict=True):
            (our_number, our_flag), (their_number, their_flag) = map(number_and_flag, (one, other))
            assert abs(our_number - their_number) <= 1e-4, (name, our["doc_id"])
            assert our_flag == their_flag
        for metric in ("acc", "acc_norm"):
            assert our.get(metric) == their.get(metric)


def test_generated_texts_are_those_of_the_harness(both: Any) -> None:
    ours, theirs = ([sample["filtered_resps"] for sample in samples["like_gsm8k"]] for samples in both)
    assert ours == theirs
    assert any(text for (text,) in ours)


def test_the_command_keeps_metrics_and_samples_of_the_harness(model: Path, folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    options = EvaluateOptions(
        lm_eval_tasks=["like_arc", "like_lambada"], include_path=folder, limit=5, seq_len=SEQ_LEN, device="cpu"
    )
    evaluate(model, options, out=tmp_path, echo=lines.append)
    first, second = read_jsonl(tmp_path / "results.jsonl")[1:]
    assert (first["kind"], first["name"]) == ("lm_eval", "like_arc")
    assert first["results"][0]["metrics"]["acc,none"] == pytest.approx(
        sum(sample["acc"] for sample in read_jsonl(tmp_path / "items" / "like_arc.jsonl")) / 5
    )
    assert second["results"][0]["metrics"]["perplexity,none"] > 1
    assert lines[0].startswith("like_arc: ")
    again: list[str] = []
    evaluate(model, options, out=tmp_path, echo=again.append)
    assert again == lines
    unknown = EvaluateOptions(lm_eval_tasks=["nonsense"], seq_len=SEQ_LEN, device="cpu")
    with pytest.raises(EvaluationError, match="has no task 'nonsense'; list its tasks"):
        evaluate(model, unknown, out=None, echo=lines.append)
