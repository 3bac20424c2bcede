"""Tokenizers: GPT-2's files, byte-level BPE trained here, and what a file of another library may ask for."""

import json
import warnings

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from saf.data import PARTITIONS, TokenData, Tokenizer, prepare, train_bpe
from saf.errors import DataError, InputError, SafWarning

EOT = "<|endoftext|>"


@pytest.fixture(scope="module")
def bpe(texts) -> Tokenizer:
    return train_bpe(texts, vocab_size=400)


@pytest.fixture(scope="module")
def gpt2(shared) -> Tokenizer:
    return Tokenizer.load(shared / "data" / "tokenizers" / "gpt2")


def test_gpt2_from_its_two_files(gpt2, shared, tmp_path):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    folder = shared / "data" / "tokenizers" / "gpt2"
    (tmp_path / "vocab.json").write_bytes((folder / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((folder / "vocab.bpe").read_bytes())
    assert Tokenizer.load(tmp_path).fingerprint == gpt2.fingerprint


@given(text=st.text())
def test_any_text_comes_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer(texts, bpe, tmp_path):
    assert train_bpe(texts, vocab_size=400).fingerprint == bpe.fingerprint
    assert (bpe.vocab_size, bpe.eot_id) == (400, 0)
    assert bpe.encode_batch(texts[:5]) == [bpe.encode(text) for text in texts[:5]]
    bpe.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).fingerprint == bpe.fingerprint
    assert Tokenizer.load(tmp_path).same(bpe)
    assert not bpe.same(train_bpe(texts, vocab_size=300))


@pytest.mark.parametrize("name", ["bpe", "gpt2"])
def test_text_that_spells_end_of_text_is_text(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(f"a{EOT}b")
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == f"a{EOT}b"


def test_unusable_tokenizers_are_named(tmp_path, bpe, monkeypatch):
    with pytest.raises(DataError, match=r"no tokenizer there; give --tokenizer a folder with tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer file"):
        Tokenizer.load(tmp_path)
    bpe.save(tmp_path / "tokenizer.json")
    plain = json.loads((tmp_path / "tokenizer.json").read_text())
    plain["added_tokens"] = []
    plain["model"]["vocab"] = {"stop" if token == EOT else token: n for token, n in plain["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(DataError, match="no end-of-text token"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text("[")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(DataError, match="not GPT-2's vocabulary and merges"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="at least 257"):
        train_bpe(["text"], vocab_size=256)
    with pytest.raises(DataError, match=r"could not be downloaded .*encoder.json"):  # tests are offline
        prepare("python", tmp_path / "data", tokenizer="someone/no-such-model")


def test_text_is_whole_whatever_the_tokenizer_file_says(texts, source, tmp_path):
    """The file cuts texts to four tokens and fills them up to six."""
    train_bpe(texts, vocab_size=300).save(tmp_path / "whole.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "whole.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    backend.save(str(tmp_path / "tokenizer.json"))
    whole = Tokenizer.load(tmp_path / "whole.json")
    with pytest.warns(SafWarning, match="truncation and padding are switched off"):
        tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode_batch(texts[:3]) == whole.encode_batch(texts[:3])
    counts = []
    for name in ("whole.json", "tokenizer.json"):
        with warnings.catch_warnings(action="ignore"):
            data = prepare(source, tmp_path / f"of-{name}", tokenizer=str(tmp_path / name), heldout_fraction=0.3)
        with warnings.catch_warnings(action="error"):
            TokenData.open(tmp_path / f"of-{name}").tokenizer()
        counts.append([data.num_tokens(partition) for partition in PARTITIONS])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("added", ["no pre-tokenizer", "a token of two words"])
def test_a_tokenizer_that_may_join_words_gets_long_documents_whole(tmp_path, added):
    """Cut at the end of a word, this document of 0.55 MB would have other tokens."""
    train_bpe(["over the "], vocab_size=257).save(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if added == "a token of two words":
        backend.add_tokens([tokenizers.AddedToken("over the")])
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "word over the word more, " * 22_000
    tokenizer = Tokenizer.load(tmp_path)
    assert [token for piece in tokenizer.pieces(text) for token in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_document_that_cannot_be_cut_is_refused_rather_than_taken_into_memory(bpe):
    with pytest.raises(DataError, match=r"cannot be cut .*split_characters"):
        list(bpe.pieces("x" * 9_000_000))
