"""Task files of lm-evaluation-harness with their own documents, of a kind for each form of an item.

The kinds are those of HellaSwag (multiple choice), LAMBADA (log-likelihood of a target), wikitext (texts) and GSM8K
(generation up to a stop string).
"""

import json
from pathlib import Path
from typing import Any

YAML = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{context}}}}"
target_delimiter: ""
"""
KINDS = {
    "choices": """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "target": """output_type: loglikelihood
doc_to_target: "{{target}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
    "text": """output_type: loglikelihood_rolling
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answer": """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: [" a", "\\n"], do_sample: false, max_gen_toks: 40}
metric_list: [{metric: exact_match}]
""",
}
"""What makes an item one of a kind, and the kind."""


def write_task(folder: Path, name: str, items: list[dict[str, Any]]) -> None:
    """Write a task of items, each of `context`, and of `choices` and `label`, `target`, `text` or `answer`."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    kind = next(text for field, text in KINDS.items() if field in items[0])
    (folder / f"{name}.yaml").write_text(YAML.format(name=name, data=data) + kind)
