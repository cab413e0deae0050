"""Task files of lm-evaluation-harness with their own documents: multiple choice, or a cloze with a target."""

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
CHOICE = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
CLOZE = """output_type: loglikelihood
doc_to_target: "{{target}}"
metric_list: [{metric: acc}, {metric: perplexity}]
"""


def write_task(folder: Path, name: str, items: list[dict[str, Any]]) -> None:
    """Write a task: items of `context`, `choices` and `label`, or of `context` and `target`."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    kind = CHOICE if "choices" in items[0] else CLOZE
    (folder / f"{name}.yaml").write_text(YAML.format(name=name, data=data) + kind)
