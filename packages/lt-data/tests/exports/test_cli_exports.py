"""`lt data export` and `lt data import`, run as the installed program."""

import numpy as np

from lt_data import TokenStore


def test_there_and_back(store, tmp_path, run):
    out = tmp_path / "out"
    code, text, err = run("export", store.path, "--to", "litespark", "--seq-len", 128, "--out", out, "--pad-id", 5)
    rows, padding = -(-store.n_tokens // 129), -store.n_tokens % 129
    size = sum(path.stat().st_size for path in out.rglob("*.*"))
    expected = f"{rows} rows of 129 tokens, {store.n_tokens} tokens, {padding} of padding in {out} ({size} bytes)\n"
    assert (code, text) == (0, expected)
    assert err.startswith("export: ")
    back = tmp_path / "back"
    tokenizer = store.path / "tokenizer"
    code, text, err = run(
        "import", out, "--from", "litespark", "--boundaries", "bos", "--tokenizer", tokenizer, "--out", back
    )
    assert code == 0
    assert text == (
        f"{store.n_documents} documents, {store.n_tokens} tokens in {back}\n{padding} padding positions left out\n"
    )
    assert err.startswith("import: ")
    found = TokenStore(back)
    np.testing.assert_array_equal(found.lengths, store.lengths)
    np.testing.assert_array_equal(found.tokens(0, found.n_tokens), store.tokens(0, store.n_tokens))
