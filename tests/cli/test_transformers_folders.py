"""Folders of models of transformers on the command line: frozen, measured, compared, looked into, or refused."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, LlamaForSequenceClassification

import saf.integrations.transformers  # noqa: F401
from saf.cli import main
from saf.data.tokenizer import Tokenizer, train_bpe
from saf.evaluate.perplexity import read_evaluation
from saf.records.paths import Kind, kind_of
from saf.records.quantities import number, signed
from saf.surgery import uninstall_
from tests.transformers_models import LENGTH, make

FLAGS = ("--sequences", 4, "--batch-size", 2, "--device", "cpu", "--accept-loss")
TEXT = "The quick brown fox jumps over the lazy dog, and a second one sleeps. " * 40


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of transformers with its tokenizer, a file of text, and data prepared with that tokenizer."""
    root = tmp_path_factory.mktemp("transformers")
    text = root / "text.txt"
    text.write_text(TEXT)
    make("llama-grouped", vocab_size=300).save_pretrained(root / "model")
    train_bpe([TEXT], vocab_size=300).save(root / "model" / "tokenizer.json")
    (root / "lines.jsonl").write_text("\n".join(json.dumps({"text": f"{n}. {TEXT[n : n + 300]}"}) for n in range(80)))
    words = ["data", "prepare", root / "lines.jsonl", "--tokenizer", root / "model", "--heldout-fraction", 0.5]
    assert main([*map(str, words), "--out", str(root / "data"), "--workers", "1"]) == 0
    return root


@pytest.fixture(scope="module")
def frozen(base):
    """The model with a quarter of its heads frozen by the command."""
    words = ["freeze", base / "model", "--data", base / "data", "--rate", 0.25, "--max-fit-kl", 100, *FLAGS]
    assert main([*map(str, words), "--out", str(base / "frozen")]) == 0
    return base / "frozen"


def test_a_frozen_folder_opens_with_its_heads_tokenizer_and_provenance(base, frozen, saf, saf_json, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(frozen)
    assert kind_of(frozen) is kind_of(base / "model") is Kind.TRANSFORMERS
    found = saf_json("inspect", frozen)
    assert len(found["frozen"]) == 3
    assert found["num_heads"] == 12
    assert found["architecture"] == "LlamaForCausalLM"
    record = json.loads((frozen / "freezing.json").read_text())
    assert record["heads"] == found["frozen"]
    assert record["model"] == found["hash"]
    assert (record["precision"], record["ancestors"]) == ("fp32", [])
    before = saf_json("inspect", base / "model")
    assert before["frozen"] == []
    cut = shutil.copytree(frozen, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1_000])
    code, _, told = saf("inspect", cut.parent)
    assert code == 2
    assert f"{cut} is not a readable safetensors file" in told
    for lost in ("saf.json", "saf.safetensors"):
        copy = shutil.copytree(frozen, tmp_path / lost)
        (copy / lost).unlink()
        code, _, told = saf("inspect", copy)
        assert code == 2
        assert f"config.json tells of frozen heads, and {lost} is missing beside it" in told
    assert record["provenance"]["checkpoints"]["parent"] == before["hash"] != found["hash"]
    assert (frozen / "tokenizer.json").read_bytes() == (base / "model" / "tokenizer.json").read_bytes()
    assert model(torch.ones(1, 8, dtype=torch.long)).logits.isfinite().all()


def test_a_new_process_opens_a_frozen_folder(base, frozen, tmp_path):
    words = ["evaluate", frozen, "--data", base / "data", "--length", 16, "--limit", 1, "--device", "cpu"]
    subprocess.run([sys.executable, "-m", "saf", *map(str, words), "--out", tmp_path / "out"], check=True, timeout=240)


def test_evaluations_keep_log_probabilities_and_compare(base, frozen, saf, saf_json, tmp_path):
    records = {}
    for name, folder in (("ordinary", base / "model"), ("frozen", frozen)):
        words = ("evaluate", folder, "--data", base / "data", "--limit", 6, "--device", "cpu")
        records[name] = saf_json(*words, "--out", tmp_path / name)
    model, windows = AutoModelForCausalLM.from_pretrained(frozen), []
    tokens = saf_tokens(base / "data")
    for row in range(6):
        ids = tokens[row * LENGTH : (row + 1) * LENGTH + 1]
        with torch.no_grad():
            logits = model(ids[None, :-1], use_cache=False).logits[0].float()
        windows.append(torch.nn.functional.cross_entropy(logits, ids[1:]).double())
    _, losses = read_evaluation(tmp_path / "frozen")
    torch.testing.assert_close(losses.windows, torch.stack(windows), rtol=1e-5, atol=1e-5)
    assert losses.log_probs.shape == (6, LENGTH)
    record = saf_json("compare", tmp_path / "ordinary", tmp_path / "frozen", "--out", tmp_path)
    ratio = records["frozen"]["perplexity"] / records["ordinary"]["perplexity"]
    assert record["delta_ppl_percent"] == pytest.approx(100 * (ratio - 1))
    assert record["provenance"]["checkpoints"]["frozen"] == saf_json("inspect", frozen)["hash"]
    assert saf_json("evaluate", base / "model", "--data", base / "text.txt", "--out", tmp_path / "text")["windows"] > 2
    assert (record["made_from"], record["differences"]) == (True, [])
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(frozen, dtype=torch.bfloat16).save_pretrained(half)
    shutil.copyfile(base / "model" / "tokenizer.json", half / "tokenizer.json")
    words = ("evaluate", half, "--data", base / "data", "--limit", 6, "--device", "cpu", "--out")
    assert saf_json(*words, tmp_path / "narrow")["precision"] == "bf16 weights"
    for one, other, said in (
        ("text", "frozen", "differ in data_fingerprint"),
        ("ordinary", "narrow", "differ in precision: fp32 in"),
        ("frozen", "ordinary", "has no frozen or pruned heads, and that of"),
    ):
        code, _, told = saf("compare", tmp_path / one, tmp_path / other)
        assert code == 2
        assert said in told
    # Opened in float32; the hash is of other files than `saf freeze` wrote, so that nothing tells what it is made from.
    assert saf_json(*words, tmp_path / "wide", "--precision", "fp32")["precision"] == "fp32"
    for other, found in ((base / "model", "is a model of transformers"), (tmp_path / "none", "does not exist")):
        for pair in ((tmp_path / "ordinary", other), (other, tmp_path / "ordinary")):
            code, _, told = saf("compare", *pair)
            assert code == 2
            assert f"{other} {found}" in told
            assert "expected an evaluation (`saf evaluate --out`)" in told
    code, shown, _ = saf("compare", tmp_path / "ordinary", tmp_path / "wide")
    assert code == 0
    assert "No file says whether the frozen model was made from the ordinary one." in " ".join(shown.split())
    code, _, told = saf(
        "freeze", half, "--data", base / "data", "--precision", "fp32", *FLAGS, "--out", tmp_path / "no"
    )
    assert code == 2
    assert "precision fp32 needs a model in float32, got bf16 weights" in told


def test_a_folder_whose_heads_were_all_undone_is_an_ordinary_one(base, frozen, saf_json, tmp_path):
    folder = shutil.copytree(frozen, tmp_path / "undone")
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(f"{card}\nMine.\n")
    model = AutoModelForCausalLM.from_pretrained(folder)
    uninstall_(model)
    model.save_pretrained(folder)
    found = saf_json("inspect", folder)
    assert (found["architecture"], found["frozen"], found["patterns"]) == ("LlamaForCausalLM", [], [])
    assert not any((folder / name).exists() for name in ("saf.json", "saf.safetensors"))
    card = (folder / "README.md").read_text()
    assert "frozen" not in card
    assert "Mine." in card
    # A sidecar beside an ordinary model is of somebody else.
    shutil.copyfile(frozen / "saf.json", folder / "saf.json")
    AutoModelForCausalLM.from_pretrained(base / "model").save_pretrained(folder)
    assert (folder / "saf.json").is_file()


def test_a_page_tells_of_heads_fits_and_quality(base, frozen, saf, saf_json, tmp_path):
    for name, folder in (("before", base / "model"), ("after", frozen)):
        saf_json("evaluate", folder, "--data", base / "data", "--limit", 6, "--device", "cpu", "--out", tmp_path / name)
    words = ("compare", tmp_path / "before", tmp_path / "after", "--card")
    record = saf_json(*words, frozen)
    card = (frozen / "README.md").read_text()
    assert "by variance, at a rate of 25.0%, patterns by mean; calibrated on 4 sequences of 32 tokens of data;" in card
    assert f"a change of {signed(record['delta_ppl_percent'], 3)} (95% interval" in card
    assert f"on 6 windows of {LENGTH} tokens, in fp32" in card
    code, _, told = saf(*words, base / "model")
    assert code == 2
    assert f"is not an evaluation of {base / 'model'} as it is" in told
    saf_json("report", frozen, tmp_path / "before", tmp_path / "after", "--out", tmp_path / "whole.html")
    page = (tmp_path / "whole.html").read_text()
    freezing = json.loads((frozen / "freezing.json").read_text())
    assert page.count("<td>frozen</td>") == len(freezing["heads"])
    assert f"{signed(record['delta_ppl_percent'], 3)}" in page
    assert f"{number(max(kl for *_, kl in freezing['fit_kl']), 3)} nats" in page
    assert freezing["model"][:12] in page
    # What a Trainer leaves has no scores; what freezing cost may not be known.
    shutil.copytree(frozen, tmp_path / "bare", ignore=shutil.ignore_patterns("events*", "freezing.json"))
    saf_json("report", tmp_path / "bare")
    bare = (tmp_path / "bare" / "report.html").read_text()
    assert "change of perplexity" in bare
    assert bare.count("<td>frozen</td>") == 3
    config = tmp_path / "bare" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"changed": True}))
    for words, told in (
        ((base / "model",), "none of its heads is frozen"),
        ((frozen, tmp_path / "before"), "two: of the model before and after; got 1"),
        ((frozen, tmp_path / "after", tmp_path / "before"), "has no frozen or pruned heads"),
        ((tmp_path / "bare", tmp_path / "before", tmp_path / "after"), "is not an evaluation of"),
        ((frozen, base / "data"), "expected an evaluation"),
    ):
        code, _, said = saf("report", *words)
        assert code == 2
        assert told in said


def saf_tokens(data):
    """The tokens of the report partition `[N]`."""
    from saf.data import TokenData

    return torch.tensor(TokenData.open(data).tokens("report")[:])


def test_text_calibrates_by_the_folders_own_tokenizer(base, saf, saf_json, tmp_path):
    words = ("freeze", base / "model", "--data", base / "text.txt", "--max-fit-kl", 100, *FLAGS)
    short = ("--length", 16, "--allow-shorter", "--out", tmp_path / "out")
    assert saf_json(*words, *short)["length"] == 16
    evaluated = saf_json("evaluate", tmp_path / "out", "--data", base / "text.txt")
    assert evaluated["length"] == 16, "what the patterns cover"
    tokenizer = Tokenizer.load(base / "model")
    assert evaluated["windows"] == len(tokenizer.encode(TEXT)) // 16
    code, _, told = saf(*words, "--length", LENGTH + 1, "--out", tmp_path / "long")
    assert code == 2
    assert f"of {LENGTH + 1} tokens are longer than the model's maximum of {LENGTH}" in told
    code, _, told = saf(*words, "--sequences", 100_000, "--out", tmp_path / "many")
    assert code == 2
    assert "ask for fewer or shorter ones" in " ".join(told.split())


def test_attention_dropout_is_switched_off_and_told(base, saf, tmp_path):
    shutil.copytree(base / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    words = ("--data", base / "text.txt", "--length", 16, "--allow-shorter", "--max-fit-kl", 100, *FLAGS)
    code, _, told = saf("freeze", tmp_path / "model", *words, "--out", tmp_path / "out")
    assert code == 0
    assert "frozen heads have no attention dropout: attention_dropout was 0.1 and is 0 in" in told
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").train()
    assert model.config.attention_dropout == 0.0
    assert model(torch.ones(1, 8, dtype=torch.long)).logits.isfinite().all()


def test_sequences_begin_with_the_tokenizers_bos_where_it_is_asked_for(base, saf, saf_json, tmp_path):
    shutil.copytree(base / "model", tmp_path / "model")
    words = ("--data", base / "text.txt", "--bos")
    code, _, told = saf("evaluate", tmp_path / "model", *words)
    assert code == 2
    assert "has no token that begins a text (BOS)" in told
    assert "leave --bos out" in told
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"bos_token": "Q"}')
    frozen = (*words, "--length", 16, "--allow-shorter", "--max-fit-kl", 100, *FLAGS, "--out")
    begun = saf_json("freeze", tmp_path / "model", *frozen, tmp_path / "begun")
    text = Tokenizer.load(base / "model")
    (bos,), ids = text.encode("Q"), text.encode(TEXT)
    assert json.loads((tmp_path / "begun" / "freezing.json").read_text())["bos"] == bos
    plain = saf_json("freeze", tmp_path / "model", *(word for word in frozen if word != "--bos"), tmp_path / "plain")
    assert begun["sequences_hash"] != plain["sequences_hash"]
    evaluate = ("evaluate", tmp_path / "begun", "--data", base / "text.txt", "--out")
    assert saf_json(*evaluate, tmp_path / "one", "--bos")["bos"] == bos
    _, losses = read_evaluation(tmp_path / "one")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "begun")(torch.tensor([[bos, *ids[:15]]])).logits[0]
    expected = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[:16])).double()
    torch.testing.assert_close(losses.windows[0], expected, rtol=1e-5, atol=1e-5)
    saf_json(*evaluate, tmp_path / "other")
    code, _, told = saf("compare", tmp_path / "one", tmp_path / "other")
    assert code == 2
    assert f"differ in bos: {bos} in" in told


def test_another_tokenizer_is_refused_by_name(base, saf, tmp_path):
    shutil.copytree(base / "model", tmp_path / "model")
    train_bpe([TEXT.upper()], vocab_size=280).save(tmp_path / "model" / "tokenizer.json")
    code, _, told = saf("evaluate", tmp_path / "model", "--data", base / "data")
    assert code == 2
    assert "must be of the tokenizer" in told
    assert f"saf data prepare TEXT --tokenizer {tmp_path / 'model'}" in told
    (tmp_path / "model" / "tokenizer.json").unlink()
    code, _, told = saf("evaluate", tmp_path / "model", "--data", base / "data")
    assert code == 2
    assert "no tokenizer" in told


@pytest.mark.parametrize("command", ["freeze", "evaluate"])
def test_a_wrong_folder_is_refused_with_what_was_expected(command, base, frozen, saf, tmp_path, monkeypatch):
    out = ("--out", tmp_path / "out")

    def told(path, *words):
        code, _, error = saf(command, path, "--data", base / "text.txt", *words, *out)
        assert code == 2
        assert not (tmp_path / "out").exists()
        return error

    shutil.copytree(base / "model", tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    wanted = "expected a checkpoint (step-N), a run, a folder written by saf.save or a model of transformers"
    assert wanted in told(tmp_path / "model")
    shutil.copytree(base / "model", tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    assert "no weights, model.safetensors" in told(tmp_path / "weightless")
    shutil.copytree(base / "model", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"transformers cannot open {tmp_path / 'cut'}: " in told(tmp_path / "cut")
    shutil.copytree(frozen, tmp_path / "over")
    shutil.copytree(base / "model", tmp_path / "over", dirs_exist_ok=True)
    assert "the folder's own model has none, move saf.json and saf.safetensors out" in told(tmp_path / "over")
    assert "an ordinary LlamaForCausalLM" in saf("inspect", tmp_path / "over")[1]
    config = make("llama-grouped").config
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classes")
    wrong = told(tmp_path / "classes")
    assert "must hold a causal language model (...ForCausalLM), got LlamaForSequenceClassification" in wrong

    def missing(name, file, **_):
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nmore")

    monkeypatch.setattr("saf.hf.folders.cached_file", missing)
    assert "someone/model must be a checkpoint, a run, a model's folder or its name on the hub" in told("someone/model")


def test_a_model_of_the_hub_has_its_tokenizer_read_and_copied(base, frozen, saf, tmp_path, monkeypatch):
    """Files come to the cache as they are asked for; the parent's hash is of all of them."""
    cache = tmp_path / "snapshot"
    cache.mkdir()

    def fetched(name, file, **_):
        assert name == "someone/model"
        if (base / "model" / file).is_file():
            shutil.copyfile(base / "model" / file, cache / file)
            return str(cache / file)
        return None

    class Hub:
        @staticmethod
        def from_pretrained(name, **options):
            for file in ("generation_config.json", "model.safetensors"):
                fetched(name, file)
            return AutoModelForCausalLM.from_pretrained(cache, **options)

    class Settings:
        @staticmethod
        def from_pretrained(name):
            return AutoConfig.from_pretrained(cache)

    for place, stand_in in (("cached_file", fetched), ("AutoModelForCausalLM", Hub), ("AutoConfig", Settings)):
        monkeypatch.setattr(f"saf.hf.folders.{place}", stand_in)
    words = [
        "--data",
        base / "text.txt",
        "--rate",
        0.25,
        "--max-fit-kl",
        100,
        "--allow-shorter",
        "--length",
        16,
        *FLAGS,
    ]
    saf("freeze", "someone/model", *words, "--out", tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "model/tokenizer.json").read_bytes()
    record = json.loads((tmp_path / "out/freezing.json").read_text())
    known = json.loads((frozen / "freezing.json").read_text())
    assert record["provenance"]["checkpoints"]["parent"] == known["provenance"]["checkpoints"]["parent"]
