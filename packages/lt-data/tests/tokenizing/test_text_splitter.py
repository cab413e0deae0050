"""Long documents in pieces give the ids of the whole; SentencePiece-style tokenizers, beside transformers' own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from lt_data import Document, Tokenizer
from lt_data.tokenizing.encode import Encoder, encode_documents
from lt_data.tokenizing.engine_selection import choose_engine
from lt_data.tokenizing.text_splitter import KNOWN_SPLITS, TextSplitter

SPACE = "\u2581"
ALPHABET = (
    "abXY' stl\n\t\r019.,;!?/-_=|<>\u00e9\u6771\u4eac\u3002\u3001\u306e\U0001f98a\u0301\u2581\u00a0\u3000\u200b\u017f"
)
WORDS = [*ALPHABET, *"      \n\n", *["<s>", "</s>", "<|eos|>", "<s> a", " <|eos|>\n"] * 3]
some_text = st.lists(st.sampled_from(WORDS), max_size=60).map("".join)


def changed(tokenizer: Tokenizer, **parts: object) -> Tokenizer:
    model = json.loads(tokenizer.files["tokenizer.json"]) | parts
    return Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": json.dumps(model).encode()})


def byte_level(split: str | None) -> dict[str, object]:
    if split is None:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    return {"type": "Sequence", "pretokenizers": steps}


@pytest.fixture(scope="session")
def llama2(texts: list[str]) -> Tokenizer:
    """As Llama 2's: three special tokens, 256 bytes, then pieces; a space is U+2581, also before the text."""
    learnt = tokenizers.Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    learnt.train_from_iterator(
        [*texts, "the cat sat on the mat <s> a < b </s>"] * 2, trainers.BpeTrainer(vocab_size=400, show_progress=False)
    )
    model = json.loads(learnt.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(letters)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizerFast"}
    files = {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return Tokenizer.from_bytes(files, name="llama2-like")


def metaspace(tokenizer: Tokenizer, scheme: str) -> Tokenizer:
    step = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    return changed(tokenizer, normalizer=None, pre_tokenizer=step)


@pytest.fixture(scope="session")
def kinds(tokenizer: Tokenizer, llama2: Tokenizer) -> dict[str, Tokenizer]:
    found = {f"split {i}": changed(tokenizer, pre_tokenizer=byte_level(s)) for i, s in enumerate(KNOWN_SPLITS)}
    found |= {"gpt2": changed(tokenizer, pre_tokenizer=byte_level(None)), "llama2": llama2}
    found["nfc"] = changed(tokenizer, normalizer={"type": "NFC"})
    return found | {scheme: metaspace(llama2, scheme) for scheme in ("always", "first", "never")}


KINDS = [*(f"split {i}" for i in range(len(KNOWN_SPLITS))), "gpt2", "nfc", "llama2", "always", "first", "never"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=some_text, characters=st.integers(1, 20))
def test_pieces_give_the_ids_of_the_whole(kinds: dict[str, Tokenizer], kind: str, text: str, characters: int) -> None:
    tokenizer = kinds[kind]
    for mode in ("text", "ids"):
        splitter = TextSplitter(tokenizer.files, special_tokens_as=mode)
        assert splitter.can_split
        pieces = splitter.split(text, characters)
        whole = tokenizer.encode_batch([text], special_tokens_as=mode)[0].tolist()
        assert [i for ids in tokenizer.encode_batch(pieces, special_tokens_as=mode) for i in ids.tolist()] == whole


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_is_cut_into_pieces_of_the_size_asked_for(kinds: dict[str, Tokenizer], kind: str) -> None:
    splitter = TextSplitter(kinds[kind].files, special_tokens_as="text")
    pieces = splitter.split("some words, and more. " * 1000, 500)
    assert len(pieces) == 22000 // 500 + (22000 % 500 > 0) or 42 <= len(pieces) <= 44
    assert max(map(len, pieces)) <= 510
    assert splitter.split("a" * 2000, 500) == ["a" * 2000]  # there is no place to cut


def test_what_cannot_be_cut_stays_whole(tokenizer: Tokenizer, llama2: Tokenizer) -> None:
    model = json.loads(llama2.files["tokenizer.json"])
    crossing = json.loads(json.dumps(model["model"]))
    crossing["vocab"][f"x{SPACE}"] = 10_000
    reaching = [{**model["added_tokens"][0], "rstrip": True}]
    spaced = [{**model["added_tokens"][0], "content": "two words"}]
    for odd in (
        changed(tokenizer, pre_tokenizer=byte_level(r"\w+|\W+")),
        changed(tokenizer, pre_tokenizer={"type": "Whitespace"}),
        changed(tokenizer, pre_tokenizer={**byte_level(None), "add_prefix_space": True}),
        changed(tokenizer, normalizer={"type": "Lowercase"}),
        changed(llama2, model=crossing),
        changed(llama2, added_tokens=reaching),
        changed(llama2, added_tokens=spaced),
        changed(llama2, normalizer={"type": "NFKC"}),
    ):
        splitter = TextSplitter(odd.files, special_tokens_as="text")
        assert not splitter.can_split
        assert splitter.split("a b " * 1000, 10) == ["a b " * 1000]


@pytest.mark.parametrize("engine", ["hf", "gigatoken"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_long_document_is_a_batch_of_its_own(
    llama2: Tokenizer, tokenizer: Tokenizer, workers: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "gigatoken":
        pytest.importorskip("gigatoken", reason="needs lt-data[fast]")
    monkeypatch.setattr("lt_data.tokenizing.encode._LONG_BYTES", 3000)
    monkeypatch.setattr("lt_data.tokenizing.encode._PIECE_CHARACTERS", 100)
    long = "the quick brown fox, 1234567 \u6771\u4eac na\u00efve <s>\n<|eos|> " * 100
    texts = ["before", long, "after", "and more", long]
    documents = [Document(text=text, source=str(i), file_index=0, next_record=i + 1) for i, text in enumerate(texts)]
    for used in (tokenizer, llama2) if workers == 1 else (tokenizer,):
        encoder = Encoder(used, bos=True, eos=True, engine=engine)
        found = list(encode_documents(documents, encoder, workers))
        assert [batch.next_record for batch, _ in found] == [1, 2, 4, 5]
        ids = [i for _, encoded in found for i in encoded.tokens.tolist()]
        assert ids == [i for e in used.encode_batch(texts) for i in (used.bos_id, *e.tolist(), used.eos_id)]
        lengths = [n for _, encoded in found for n in encoded.lengths.tolist()]
        assert lengths == [e.size + 2 for e in used.encode_batch(texts)]
        special = "<s>" if used is llama2 else "<|eos|>"
        assert [encoded.special_strings.get(special, 0) for _, encoded in found] == [0, 100, 0, 100]


def test_sentencepiece_with_both_engines(llama2: Tokenizer, texts: list[str]) -> None:
    assert (llama2.bos_id, llama2.eos_id, llama2.special_strings) == (1, 2, ("</s>", "<s>", "<unk>"))
    ids = llama2.encode_batch(["\u4e2d <s>", "", " "])
    assert [hex(i - 3) for i in ids[0].tolist()[1:4]] == ["0xe4", "0xb8", "0xad"]  # a character by its bytes
    assert llama2.decode(ids[0]) == "\u4e2d <s>"
    assert not {1, 2} & set(ids[0].tolist())
    assert llama2.encode_batch(["<s>"], special_tokens_as="ids")[0].tolist() == [1]
    pytest.importorskip("gigatoken", reason="needs lt-data[fast]")
    # Whether the fast engine can do it is for the check to say; the ids are the same in any case.
    choice = choose_engine(llama2, requested="auto", special_tokens_as="text", texts=texts, check_bytes=1000)
    assert choice.name == "gigatoken" or "gigatoken" in choice.reason
    encoded = Encoder(llama2, bos=False, eos=False, engine=choice).encode(texts)
    assert encoded.tokens.tolist() == [i for e in llama2.encode_batch(texts) for i in e.tolist()]


def test_transformers_gives_the_same_ids(llama2: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    llama2.save(tmp_path / "made")
    more = [*texts[:10], " leading", "two  spaces", "<s> </s>", "\n\n", "\u4e2d\u0000", " ", "tail "]
    (tmp_path / "texts.json").write_text(json.dumps(more), encoding="utf-8")
    code = """
import json
from transformers import LlamaTokenizerFast, PreTrainedTokenizerFast
texts = json.load(open("texts.json"))
LlamaTokenizerFast.from_pretrained("made", local_files_only=True).save_pretrained("theirs")
found = {}
for name, kind in (("made", PreTrainedTokenizerFast), ("theirs", LlamaTokenizerFast)):
    tokenizer = kind.from_pretrained(name, local_files_only=True)
    for split in (False, True):
        rows = [tokenizer(t, add_special_tokens=False, split_special_tokens=split)["input_ids"] for t in texts]
        found[f"{name} {split}"] = rows
print(json.dumps(found))
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "USE_TORCH": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for name in ("made", "theirs"):  # the layout of Llama 2's own file, and what LlamaTokenizerFast makes of it
        ours = Tokenizer.load(tmp_path / name)
        for mode, split in (("ids", False), ("text", True)):
            rows = [ids.tolist() for ids in ours.encode_batch(more, special_tokens_as=mode)]  # type: ignore[arg-type]
            assert rows == found[f"{name} {split}"], (name, mode)
