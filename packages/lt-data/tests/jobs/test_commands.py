"""`prepare` from the command line: every option arrives, and what was left out is printed."""

import json

import pytest

from lt_data import TokenStore


@pytest.fixture
def prepared(fast_path, tokenizer, monkeypatch) -> list[str]:
    monkeypatch.chdir(fast_path)
    tokenizer.save(fast_path / "tok")
    (fast_path / "in").mkdir()
    for number in range(3):
        lines = [json.dumps({"body": text}) for text in ("a" * 40, f"text {number} <|eos|> and more", "same", "")]
        lines.append("{broken")
        (fast_path / f"in/{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = "prepare in --tokenizer tok --out store --engine hf --special-tokens-as ids --text-field body --on-bad skip"
    return [*words.split(), "--drop-duplicates", "--min-tokens", "4", "--max-chars", "30", "--shard-tokens", "20"]


def test_the_options_arrive_and_what_was_left_out_is_printed(run, prepared):
    code, out, err = run(*prepared)
    assert code == 0, err
    assert "skipped as broken JSON line: for example in/0.jsonl:5: " in err
    assert out.splitlines()[1:] == [
        "2 documents left out: duplicate (8 bytes)",
        "3 documents left out: empty (0 bytes)",
        "3 documents left out: too many characters (120 bytes)",
        "3 skipped: broken JSON line",
        "special string <|eos|> occurs 3 times in the text, encoded as its special id",
    ]
    store = TokenStore("store")
    assert (store.n_documents, store.manifest.special_tokens_as, store.manifest.shard_tokens) == (4, "ids", 20)
    assert run(*prepared)[0] == 0
    train = ("train-tokenizer", "in", "--vocab-size", 300, "--text-field", "body", "--out", "new")
    code, out, err = run(*train)
    assert (code, "in/0.jsonl:5: not a JSON value" in err) == (64, True)
    code, out, err = run(*train, "--on-bad", "skip")
    assert (code, "3 skipped: broken JSON line\n" in out) == (0, True)
    code, _, err = run(*prepared, "--no-bos")
    assert code == 64
    assert "bos was True and is False" in err
