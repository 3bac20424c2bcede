"""The token that ends a document is the one that the tokenizer's own files name; a bare file has a usual name."""

import json

import numpy as np
import pytest
import tokenizers

from saf.cli import main
from saf.data import PARTITIONS, TokenData, Tokenizer, prepare
from saf.data.tokenizer import train_bpe
from saf.errors import DataError

TEXTS = [f"Document {n} says: " + "some words to learn from " * (n % 5 + 2) for n in range(40)]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer that also has a token of the usual name, and `<fin>`, which nothing names yet."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    train_bpe(TEXTS, vocab_size=300).save(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<fin>"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def source(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path / "text.jsonl"


@pytest.mark.parametrize(
    ("name", "eos"),
    [
        ("tokenizer_config.json", "<fin>"),
        ("tokenizer_config.json", {"__type": "AddedToken", "content": "<fin>"}),
        ("special_tokens_map.json", "<fin>"),
        ("special_tokens_map.json", {"content": "<fin>"}),
    ],
)
def test_the_tokenizers_own_token_ends_documents(folder, source, tmp_path, name, eos):
    (folder / name).write_text(json.dumps({"eos_token": eos, "pad_token": "<|endoftext|>"}))
    out = tmp_path / "data"
    prepare(str(source), out, tokenizer=str(folder), heldout_fraction=0.4, workers=1)
    data = TokenData.open(out, verify=True)
    fin = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<fin>")
    assert data.eot_id == data.tokenizer().eot_id == Tokenizer.load(out).eot_id == fin
    assert sum(int((np.asarray(data.tokens(part)) == fin).sum()) for part in PARTITIONS) == len(TEXTS)
    # The prepared folder is a tokenizer's folder too.
    again = prepare(str(source), tmp_path / "again", tokenizer=str(out), heldout_fraction=0.4, workers=1)
    assert again.fingerprint == data.fingerprint


def test_a_bare_file_has_a_usual_name(folder):
    assert Tokenizer.load(folder).eot_token == "<|endoftext|>"


def test_a_token_that_the_vocabulary_lacks_is_refused(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<other>"}))
    with pytest.raises(DataError, match="<other>"):
        Tokenizer.load(folder)


def test_gpt2s_two_files_may_have_another_token(folder, tmp_path):
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    two = tmp_path / "two"
    two.mkdir()
    (two / "vocab.json").write_text(json.dumps({**model["vocab"], "<fin>": max(model["vocab"].values()) + 1}))
    (two / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (two / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<fin>"}))
    assert Tokenizer.load(two).eot_token == "<fin>"


def test_a_model_of_transformers_with_such_a_token_is_evaluated_on_text(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.transformers_models import make

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    kept = tmp_path / "model"
    make("llama-grouped", vocab_size=backend.get_vocab_size()).save_pretrained(kept)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<fin>").save_pretrained(kept)
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    words = ["evaluate", kept, "--data", tmp_path / "text.txt", "--length", 16, "--device", "cpu"]
    assert main(list(map(str, words))) == 0
    assert Tokenizer.load(kept).eot_token == "<fin>"
