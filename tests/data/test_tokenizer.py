import json
import shutil
import warnings
from hashlib import blake2b, sha256
from unittest.mock import ANY

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from saf.data import TokenData, prepare
from saf.data.config import PrepareConfig
from saf.data.documents import lowest_keys, order_key
from saf.data.sources import resolve
from saf.data.token_data import DataIndex
from saf.data.tokenizer import EOT, Tokenizer, choose_tokenizer, sample_text, train_bpe
from saf.errors import DataError, InputError, SafWarning


@pytest.fixture(scope="module")
def bpe(texts) -> Tokenizer:
    return train_bpe(texts, vocab_size=400)


@pytest.fixture(scope="module")
def gpt2(shared) -> Tokenizer:
    return Tokenizer.load(shared / "data" / "tokenizers" / "gpt2")


def test_gpt2_from_two_local_files(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.vocab_size == 50257
    assert gpt2.eot_id == 50256
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


def test_gpt2_files_under_their_other_names(shared, gpt2, tmp_path):
    folder = shared / "data" / "tokenizers" / "gpt2"
    (tmp_path / "vocab.json").write_bytes((folder / "encoder.json").read_bytes())
    (tmp_path / "merges.txt").write_bytes((folder / "vocab.bpe").read_bytes())
    assert Tokenizer.load(tmp_path).fingerprint == gpt2.fingerprint


def test_gpt2_offline_says_what_to_give_instead(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"could not be downloaded .*encoder.json"):
        Tokenizer.from_hub()
    with pytest.raises(
        DataError, match="someone/model: no such folder here, and its tokenizer could not be downloaded"
    ):
        choose_tokenizer([], PrepareConfig(tokenizer="someone/model"))


@given(text=st.text())
def test_any_text_comes_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer(texts, bpe):
    assert train_bpe(texts, vocab_size=400).fingerprint == bpe.fingerprint
    assert bpe.vocab_size == 400
    assert bpe.eot_id == 0


@pytest.mark.parametrize("name", ["bpe", "gpt2"])
def test_text_that_spells_end_of_text_is_text(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(f"a{EOT}b")
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == f"a{EOT}b"


def test_batch_equals_one_by_one(bpe, texts):
    assert bpe.encode_batch(texts[:5]) == [bpe.encode(text) for text in texts[:5]]


def test_save_and_load_keep_the_fingerprint(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    assert (
        Tokenizer.load(tmp_path).fingerprint
        == bpe.fingerprint
        == Tokenizer.load(tmp_path / "tokenizer.json").fingerprint
    )


def test_unusable_tokenizers_are_named(tmp_path, bpe):
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
    (tmp_path / "vocab.json").write_text("[")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(DataError, match="not GPT-2's vocabulary and merges"):
        Tokenizer.from_gpt2_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    with pytest.raises(InputError, match="at least 257"):
        train_bpe(["text"], vocab_size=256)


@pytest.fixture(scope="module")
def cutting(texts, tmp_path_factory):
    """A tokenizer file that cuts texts to four tokens and fills them up to six."""
    backend = tokenizers.Tokenizer.from_str(train_bpe(texts, vocab_size=300)._data.decode())
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    path = tmp_path_factory.mktemp("cutting") / "tokenizer.json"
    backend.save(str(path))
    return path


def test_a_tokenizer_neither_cuts_nor_pads(cutting, texts, tmp_path):
    with pytest.warns(SafWarning, match=r"truncation \(to 4\) and padding \(to 6\) switched off"):
        tokenizer = Tokenizer.load(cutting)
    whole = train_bpe(texts, vocab_size=300)
    assert tokenizer.encode(texts[0]) == whole.encode(texts[0])
    assert tokenizer.encode_batch(texts[:3]) == whole.encode_batch(texts[:3])
    tokenizer.save(tmp_path / "tokenizer.json")
    with warnings.catch_warnings(action="error"):
        assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint


def test_prepared_text_is_whole_whatever_the_tokenizer_file_says(cutting, corpus, prepared, tmp_path):
    options = {"heldout_fraction": 0.3, "workers": 1}
    with pytest.warns(SafWarning, match="switched off"):
        index = prepare(corpus, tmp_path / "data", tokenizer=str(cutting.parent), **options)
    assert [info.tokens for info in index.partitions.values()] == [
        info.tokens for info in DataIndex.load(prepared).partitions.values()
    ]


def test_data_that_a_tokenizer_file_cut_are_refused(cutting, prepared, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "data")
    shutil.copy(cutting, folder)
    record = json.loads((folder / "index.json").read_text())
    record["tokenizer"]["sha256"] = sha256(cutting.read_bytes()).hexdigest()
    index = DataIndex.from_dict({**record, "schema": "saf.data/1", "fingerprint": ANY})
    index.save(folder)
    with pytest.warns(SafWarning), pytest.raises(DataError, match=r"cuts texts short or pads them.*not whole"):
        TokenData.open(folder)


def test_the_sample_is_capped_and_leaves_out_what_may_be_held_out(corpus, texts):
    config = PrepareConfig(tokenizer_bytes=8000, heldout_fraction=0.2)
    pieces, facts = sample_text([resolve(str(corpus))], config)
    assert facts["bytes"] == sum(len(piece.encode()) for piece in pieces) <= 8000
    assert facts["bytes"] > 6000
    everything, facts = sample_text([resolve(str(corpus))], PrepareConfig(heldout_fraction=0.2))
    assert facts["drawn_from_bytes"] == sum(len(text.encode()) for text in texts)
    assert set(pieces) <= set(everything) < set(texts)
    held_back = set(texts) - set(everything)
    keys = [order_key(blake2b(text.encode(), digest_size=16).digest(), 0) for text in held_back]
    assert max(keys) < lowest_keys(0.2) <= 2**64 * 0.4
