"""The guide's hand-over to datatrove and back, run as the guide has it, in an environment that uv makes."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lt_data import Tokenizer, TokenStore, prepare

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "data.md"
PACKAGES = ("datatrove[io,processing]==0.10.1", "spacy")
WORDS = [
    "river",
    "stone",
    "quiet",
    "morning",
    "letter",
    "window",
    "garden",
    "story",
    "market",
    "music",
    "winter",
    "road",
]


def sentences(rng: random.Random, n: int) -> str:
    return " ".join(f"The {' '.join(rng.choices(WORDS, k=9))} {rng.randrange(10**6)}." for _ in range(n))


@pytest.mark.slow
def test_the_pipeline_of_the_guide(tmp_path: Path) -> None:
    if shutil.which("uv") is None:
        pytest.skip("uv, which makes the environment with datatrove, is not installed")
    python = tmp_path / "environment" / "bin" / "python"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, tmp_path / "environment"], check=True)
    made = subprocess.run(["uv", "pip", "install", "-q", "--python", python, *PACKAGES], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"datatrove cannot be installed here: {made.stderr[-300:]}")
    rng = random.Random(5)
    good = [sentences(rng, 30) for _ in range(60)]
    near = [text.replace("The ", "A ", 1) for text in good[:20]]
    repetitive = ["the same line again and again\n" * 60 for _ in range(10)]
    lines = [json.dumps({"text": text, "id": str(i)}) for i, text in enumerate([*good, *near, *repetitive])]
    (tmp_path / "crawl.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (block,) = re.findall(r"```python\n(from datatrove.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "pipeline.py").write_text(block, encoding="utf-8")
    run = subprocess.run([python, "pipeline.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-2000:]
    tokenizer = Tokenizer.train(good, vocab_size=300)
    prepare([tmp_path / "clean"], tokenizer=tokenizer, out=tmp_path / "store", bos=False, eos=False)
    store = TokenStore(tmp_path / "store")
    texts = {tokenizer.decode(store[number].tolist()) for number in range(store.n_documents)}
    assert store.n_documents == len(good)
    assert len(texts & {*good, *near}) == len(good)
    assert not texts & {*repetitive}
