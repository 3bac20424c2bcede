import json
import shutil
from hashlib import sha256

import numpy as np
import pytest

from saf.data import TokenData, prepare
from saf.data.shards import ShardedTokens, ShardWriter, chunks, entropy, token_dtype
from saf.data.token_data import DataIndex
from saf.data.tokenizer import train_bpe
from saf.errors import DataError, InputError


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(prepared, tmp_path / "data")


def test_what_an_open_folder_tells(prepared):
    data = TokenData.open(prepared, verify=True)
    tokens = data.tokens("train")
    assert len(tokens) == data.num_tokens("train") == np.asarray(tokens).size
    assert data.vocab_size == data.tokenizer().vocab_size == 300
    assert data.tokenizer().fingerprint == data.index.tokenizer.sha256
    assert data.eot_id == data.tokenizer().eot_id
    assert len(data.fingerprint) == 64
    counts = np.bincount(np.asarray(tokens))
    share = counts[counts > 0] / counts.sum()
    assert data.unigram_entropy("train") == pytest.approx(-(share * np.log(share)).sum())
    with pytest.raises(InputError, match="a partition is one of train, calibration, controller, report"):
        data.tokens("test")


def test_tokens_span_shards(corpus, settings, prepared, tmp_path):
    prepare(corpus, tmp_path / "data", **settings, shard_tokens=1000)
    whole, many = TokenData.open(prepared), TokenData.open(tmp_path / "data", verify=True)
    shards = many.index.partitions["train"].shards
    assert len(shards) > 3
    assert {shard.bytes for shard in shards[:-1]} == {2000}
    expected, tokens = np.asarray(whole.tokens("train")), many.tokens("train")
    assert (np.asarray(tokens) == expected).all()
    assert tokens[990:2010].dtype == np.int64
    for start, stop in [(990, 1010), (0, 1000), (1000, 1001), (500, 3500), (7, 7), (-5, None)]:
        assert (tokens[start:stop] == expected[start:stop]).all()
    assert tokens[-1] == expected[-1]
    assert tokens[999] == expected[999]
    with pytest.raises(IndexError):
        tokens[len(tokens)]


def test_the_writer_splits_at_the_limit_and_counts(tmp_path, rng):
    ids = [rng.integers(0, 70_000, size).astype(np.uint32) for size in (3, 0, 2500, 1)]
    dtype = token_dtype(70_000)
    writer = ShardWriter(tmp_path, "x", dtype, vocab_size=70_000, shard_tokens=1000)
    for chunk in chunks(ids, dtype):
        writer.write(chunk)
    info = writer.finish(documents=4, text_bytes=9, digests=np.zeros((4, 16), dtype=np.uint8))
    assert [shard.bytes for shard in info.shards] == [4000, 4000, 4 * 504]
    tokens = ShardedTokens([tmp_path / shard.file for shard in info.shards], dtype)
    assert (np.asarray(tokens) == np.concatenate(ids)).all()
    assert info.tokens == 2504


@pytest.mark.parametrize(("size", "name"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_shard_type_follows_the_vocabulary(size, name):
    assert token_dtype(size).name == name


def test_entropy_of_known_counts():
    assert entropy(np.array([0, 5])) == 0.0
    assert entropy(np.array([3, 3, 3, 3])) == pytest.approx(np.log(4))
    assert entropy(np.zeros(3)) is None


def test_the_fingerprint_knows_tokens_not_places(prepared, folder, corpus, settings, tmp_path):
    index = prepare(corpus, tmp_path / "again", **settings)
    assert TokenData.open(folder).fingerprint == TokenData.open(prepared).fingerprint == index.fingerprint
    other = prepare(corpus, tmp_path / "other", **{**settings, "vocab_size": 310})
    assert other.fingerprint != index.fingerprint


def test_the_index_round_trips(prepared):
    index = DataIndex.load(prepared)
    assert DataIndex.from_dict(json.loads(json.dumps(index.to_dict()))) == index


def test_another_tokenizer_is_refused(folder, texts):
    train_bpe(texts, vocab_size=310).save(folder / "tokenizer.json")
    with pytest.raises(DataError, match="a data folder made with another tokenizer"):
        TokenData.open(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.json is missing"):
        TokenData.open(folder)


def test_sizes_are_always_checked_and_hashes_on_request(folder):
    path = folder / "report-00000.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(
        DataError, match=rf"report-00000.bin is damaged: expected {len(data):,} bytes, got {len(data) - 2:,}"
    ):
        TokenData.open(folder)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    TokenData.open(folder)
    with pytest.raises(DataError, match=r"report-00000.bin is damaged: expected SHA-256"):
        TokenData.open(folder, verify=True)
    path.unlink()
    with pytest.raises(DataError, match=r"report-00000.bin is missing"):
        TokenData.open(folder)


def test_a_document_in_two_partitions_is_refused(folder):
    train, report = folder / "train-documents.bin", folder / "report-documents.bin"
    data = train.read_bytes()[:16] + report.read_bytes()[16:]
    report.write_bytes(data)
    index = json.loads((folder / "index.json").read_text())
    index["partitions"]["report"]["digests"]["sha256"] = sha256(data).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="1 documents lie in two partitions"):
        TokenData.open(folder)


def test_partitions_of_the_same_text_are_refused(folder):
    index = json.loads((folder / "index.json").read_text())
    index["partitions"]["calibration"] = index["partitions"]["report"]
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="calibration and report hold the same text"):
        TokenData.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("partitions"), "damaged or from another version.*partitions"),
        (lambda index: index.update(schema="saf.data/9"), "schema 'saf.data/9', this version reads 'saf.data/1'"),
        (lambda index: index["partitions"]["train"].update(tokens=5), "train shards hold .* tokens, not 5"),
    ],
)
def test_a_damaged_index_is_named(folder, change, message):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=message):
        TokenData.open(folder)


def test_folders_that_are_not_data_folders(tmp_path, folder):
    with pytest.raises(DataError, match="no such data folder here; give --data"):
        TokenData.open(tmp_path / "none")
    with pytest.raises(DataError, match=r"not a data folder, it has no index.json"):
        TokenData.open(tmp_path)
    (folder / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index.json is not valid JSON.*; prepare it again"):
        TokenData.open(folder)
