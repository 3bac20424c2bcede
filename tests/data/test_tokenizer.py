"""Tokenizers: GPT-2's files, byte-level BPE trained here, the end-of-text token, and settings of other libraries."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from saf.data import PARTITIONS, TokenData, Tokenizer, prepare, train_bpe
from saf.errors import DataError

EOT = "<|endoftext|>"


@pytest.fixture(scope="module")
def bpe(texts) -> Tokenizer:
    return train_bpe(texts, vocab_size=400)


@pytest.fixture(scope="module")
def gpt2(shared) -> Tokenizer:
    return Tokenizer.load(shared / "data" / "tokenizers" / "gpt2")


@pytest.fixture
def backend(bpe):
    """The BPE as an object of the `tokenizers` package, for a test to change."""
    return tokenizers.Tokenizer.from_str(bpe._data.decode())


def test_gpt2_from_its_two_files(gpt2, shared, tmp_path):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    folder = shared / "data" / "tokenizers" / "gpt2"
    (tmp_path / "vocab.json").write_bytes((folder / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((folder / "vocab.bpe").read_bytes())
    assert Tokenizer.load(tmp_path).fingerprint == gpt2.fingerprint


@settings(max_examples=40)
@given(text=st.text())
def test_any_text_comes_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer(texts, bpe, tmp_path):
    assert train_bpe(texts, vocab_size=400).fingerprint == bpe.fingerprint
    assert (bpe.vocab_size, bpe.eot_id) == (400, 0)
    assert bpe.encode_batch(texts[:5]) == [bpe.encode(text) for text in texts[:5]]
    bpe.save(tmp_path)
    assert Tokenizer.load(tmp_path).same(bpe)
    assert not bpe.same(train_bpe(texts, vocab_size=300))


@pytest.mark.parametrize("name", ["bpe", "gpt2"])
def test_text_that_spells_end_of_text_is_text(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(f"a{EOT}b")
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == f"a{EOT}b"


@pytest.mark.parametrize(
    ("name", "eos"), [("tokenizer_config.json", "<fin>"), ("special_tokens_map.json", {"content": "<fin>"})]
)
def test_documents_end_with_the_token_that_the_tokenizers_own_files_name(backend, source, texts, tmp_path, name, eos):
    folder, options = tmp_path / "tokenizer", {"heldout_fraction": 0.4}
    folder.mkdir()
    backend.add_special_tokens(["<fin>"])
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).eot_token == EOT, "a bare file has a usual name"
    (folder / name).write_text(json.dumps({"eos_token": eos, "pad_token": EOT}))
    data = prepare(source, tmp_path / "data", tokenizer=str(folder), **options)
    fin = backend.token_to_id("<fin>")
    assert data.eot_id == data.tokenizer().eot_id == Tokenizer.load(tmp_path / "data").eot_id == fin
    assert sum(int((np.asarray(data.tokens(part)) == fin).sum()) for part in PARTITIONS) == len(texts)
    again = prepare(source, tmp_path / "again", tokenizer=str(tmp_path / "data"), **options)
    assert again.fingerprint == data.fingerprint, "a prepared folder is a tokenizer's folder, too"
    (folder / name).write_text(json.dumps({"eos_token": "<other>"}))
    with pytest.raises(DataError, match="<other>"):
        Tokenizer.load(folder)


def test_unusable_tokenizers_are_named(tmp_path, backend):
    plain = json.loads(backend.to_str())
    plain["added_tokens"] = []
    plain["model"]["vocab"] = {"stop" if token == EOT else token: n for token, n in plain["model"]["vocab"].items()}
    for files, words in (
        ({}, "no tokenizer there; give --tokenizer a folder with tokenizer.json"),
        ({"tokenizer.json": "{}"}, "not a tokenizer file"),
        ({"tokenizer.json": json.dumps(plain)}, "no end-of-text token"),
        ({"vocab.json": "[", "merges.txt": ""}, "not GPT-2's vocabulary and merges"),
    ):
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=words):
            Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"could not be downloaded .*tokenizer.json"):  # tests are offline
        prepare("python", tmp_path / "data", tokenizer="someone/no-such-model")


def test_a_large_vocabulary_takes_four_bytes(source, backend, tmp_path):
    tokenizer = json.loads(backend.to_str())
    tokenizer["model"]["vocab"] |= {f"word {n}": n for n in range(400, 65_537)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = prepare(source, tmp_path / "data", tokenizer=str(tmp_path), heldout_fraction=0.3)
    assert (data.vocab_size, data.tokens("train").dtype) == (65_537, np.uint32)
    TokenData.open(tmp_path / "data", verify=True)
