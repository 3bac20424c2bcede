"""Folders of models of transformers on the command line: frozen at a cost, measured, compared, or refused."""

import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

import saf.integrations.transformers  # noqa: F401
from saf.cli import main
from saf.data import TokenData
from saf.data.tokenizer import Tokenizer, train_bpe
from saf.records.files import read_json, read_tensors
from saf.records.table import signed
from saf.tasks.text import LOG_PROBS, read_evaluation
from tests.transformers_models import LENGTH, make

TEXT = "The quick brown fox jumps over the lazy dog, and a second one sleeps. " * 40
FLAGS = ("--sequences", 4, "--batch-size", 2, "--device", "cpu", "--accept-loss")
WORDS = ("--sequences", 4, "--batch-size", 2, "--length", 16, "--max-fit-kl", 100, "--device", "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of transformers that learned a text by heart, with its tokenizer, the text, and data prepared from it."""
    root, tokenizer = tmp_path_factory.mktemp("base"), train_bpe([TEXT], vocab_size=300)
    model = make("llama", vocab_size=300)
    windows = torch.tensor(tokenizer.encode(TEXT)[:512]).view(-1, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(windows, labels=windows, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(root / "model")
    tokenizer.save(root / "model")
    (root / "text.txt").write_text(TEXT)
    (root / "lines.jsonl").write_text("\n".join(json.dumps({"text": f"{n}. {TEXT[n : n + 300]}"}) for n in range(80)))
    words = ["data", "prepare", root / "lines.jsonl", "--tokenizer", root / "model", "--heldout-fraction", 0.5]
    assert main([*map(str, words), "--out", str(root / "data")]) == 0
    return root


@pytest.fixture(scope="module")
def frozen(base):
    """The model with a quarter of its heads frozen by the command."""
    words = ["freeze", base / "model", "--data", base / "data", "--rate", 0.25, "--max-fit-kl", 100, *FLAGS]
    assert main([*map(str, words), "--out", str(base / "frozen")]) == 0
    return base / "frozen"


def test_a_frozen_folder_opens_with_its_heads_tokenizer_and_provenance(base, frozen, saf_json):
    model = AutoModelForCausalLM.from_pretrained(frozen)
    assert model(torch.ones(1, 8, dtype=torch.long)).logits.isfinite().all()
    seen, before = saf_json("inspect", frozen), saf_json("inspect", base / "model")
    record = read_json(frozen / "freezing.json")
    assert (len(seen["frozen"]), seen["num_heads"], before["frozen"]) == (3, 12, [])
    assert (record["heads"], record["model"], record["precision"]) == (seen["frozen"], seen["hash"], "fp32")
    assert record["provenance"]["checkpoints"]["parent"] == before["hash"] != seen["hash"]
    assert (frozen / "tokenizer.json").read_bytes() == (base / "model" / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_new_process_opens_a_frozen_folder(base, frozen, tmp_path):
    words = ["evaluate", frozen, "--data", base / "data", "--length", 16, "--limit", 1, "--device", "cpu"]
    subprocess.run([sys.executable, "-m", "saf", *map(str, words), "--out", tmp_path / "out"], check=True, timeout=240)


def test_evaluations_keep_log_probabilities_compare_and_fill_the_card(base, frozen, saf, saf_json, tmp_path):
    words, records = ("--data", base / "data", "--limit", 6, "--device", "cpu", "--out"), {}
    for name, folder in (("ordinary", base / "model"), ("frozen", frozen)):
        records[name] = saf_json("evaluate", folder, *words, tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(frozen)
    tokens = torch.tensor(TokenData.open(base / "data").tokens("report")[: 6 * LENGTH + 1]).long()
    with torch.no_grad():
        logits = model(tokens[:-1].view(6, LENGTH), use_cache=False).logits.float()
    expected = torch.nn.functional.cross_entropy(logits.mT, tokens[1:].view(6, LENGTH), reduction="none")
    _, losses = read_evaluation(tmp_path / "frozen")
    assert read_tensors(tmp_path / "frozen" / LOG_PROBS)["log_probs"].shape == (6, LENGTH)
    torch.testing.assert_close(losses, expected.double().mean(1), rtol=1e-5, atol=1e-5)
    copy = shutil.copytree(frozen, tmp_path / "copy")
    record = saf_json("compare", tmp_path / "ordinary", tmp_path / "frozen", "--out", tmp_path, "--card", copy)
    ratio = records["frozen"]["perplexity"] / records["ordinary"]["perplexity"]
    assert record["delta_ppl_percent"] == pytest.approx(100 * (ratio - 1))
    assert record["differences"] == []
    assert signed(record["delta_ppl_percent"], 2) in (copy / "README.md").read_text()
    saf_json("report", frozen, tmp_path / "ordinary", tmp_path / "frozen", "--out", tmp_path / "page.html")
    assert signed(record["delta_ppl_percent"]) in (tmp_path / "page.html").read_text()
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(frozen, dtype=torch.bfloat16).save_pretrained(half)
    shutil.copyfile(base / "model" / "tokenizer.json", half / "tokenizer.json")
    assert saf_json("evaluate", half, *words, tmp_path / "narrow")["precision"] == "bf16 weights"
    saf_json("evaluate", base / "model", "--data", base / "text.txt", "--out", tmp_path / "text")
    for command, words in (
        (("compare", tmp_path / "text", tmp_path / "frozen"), "differ in data_fingerprint"),
        (("compare", tmp_path / "ordinary", tmp_path / "narrow"), "differ in precision: fp32 in"),
        (("compare", tmp_path / "frozen", tmp_path / "ordinary"), "has no frozen or pruned heads"),
        (("compare", tmp_path / "ordinary", base / "model"), "expected an evaluation"),
        (("compare", tmp_path / "ordinary", tmp_path / "frozen", "--card", base / "model"), "is not an evaluation of"),
        (("report", base / "model"), "none of its heads is frozen"),
    ):
        code, _, message = saf(*command)
        assert (code, words in " ".join(message.split())) == (2, True), message


def test_text_calibrates_by_the_folders_own_tokenizer(base, saf, saf_json, tmp_path):
    words = ("freeze", base / "model", "--data", base / "text.txt", "--max-fit-kl", 100, *FLAGS)
    short = ("--length", 16, "--out", tmp_path / "out")
    assert saf_json(*words, *short)["length"] == 16
    evaluated = saf_json("evaluate", tmp_path / "out", "--data", base / "text.txt")
    assert evaluated["length"] == 16, "what the patterns cover"
    tokenizer = Tokenizer.load(base / "model")
    assert evaluated["windows"] == len(tokenizer.encode(TEXT)) // 16
    for flags, message in (
        (("--length", LENGTH + 1), f"at most the {LENGTH} tokens that the model takes, got {LENGTH + 1}"),
        (("--sequences", 100_000), "100,000 sequences of 32 to calibrate"),
    ):
        code, _, err = saf(*words, *flags, "--out", tmp_path / "no")
        assert (code, message in " ".join(err.split())) == (2, True), err


def test_sequences_begin_with_the_tokenizers_bos_where_it_is_asked_for(base, saf, saf_json, tmp_path):
    shutil.copytree(base / "model", tmp_path / "model")
    words = ("--data", base / "text.txt", "--bos")
    code, _, err = saf("evaluate", tmp_path / "model", *words)
    assert (code, "must have a beginning-of-text token, got none" in err) == (2, True)
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"bos_token": "Q"}')
    frozen = (*words, "--length", 16, "--max-fit-kl", 100, *FLAGS, "--out")
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
    torch.testing.assert_close(losses[0], expected, rtol=1e-5, atol=1e-5)
    saf_json(*evaluate, tmp_path / "other")
    code, _, err = saf("compare", tmp_path / "one", tmp_path / "other")
    assert (code, f"differ in bos: {bos} in" in err) == (2, True)


def test_a_folder_that_cannot_be_used_is_refused(base, frozen, saf, tmp_path):
    def copy(name: str, *lost: str):
        folder = shutil.copytree(base / "model", tmp_path / name)
        for file in lost:
            (folder / file).unlink()
        return folder

    train_bpe([TEXT.upper()], vocab_size=280).save(copy("foreign"))
    shutil.copytree(base / "model", shutil.copytree(frozen, tmp_path / "over"), dirs_exist_ok=True)
    LlamaForSequenceClassification(make("llama-grouped").config).save_pretrained(tmp_path / "classes")
    cut = copy("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    for command, folder, data, words in (
        ("freeze", copy("none", "config.json"), "text.txt", "expected a checkpoint (step-N), a run, a folder"),
        ("freeze", cut.parent, "text.txt", "transformers cannot open"),
        ("evaluate", tmp_path / "over", "text.txt", "move saf.json and saf.safetensors out"),
        ("freeze", tmp_path / "classes", "text.txt", "must hold a causal language model"),
        ("evaluate", tmp_path / "foreign", "data", "must have the tokenizer"),
        ("freeze", copy("wordless", "tokenizer.json"), "data", "no tokenizer"),
    ):
        code, _, message = saf(command, folder, "--data", base / data, "--out", tmp_path / "out")
        assert (code, words in " ".join(message.split())) == (2, True), message
        assert not (tmp_path / "out").exists()


# --- what freezing costs


def test_a_destroyed_model_is_refused_unless_it_is_accepted(base, saf, saf_json, tmp_path):
    words = ("freeze", base / "model", "--data", base / "text.txt", "--rate", 1, *WORDS)
    code, out, err = saf(*words, "--out", tmp_path / "out")
    assert (code, out, (tmp_path / "out").exists()) == (2, "", False)
    assert all(word in err for word in ("must rise by at most 5%", "costs most", "--accept-loss"))
    result = saf_json(*words, "--accept-loss", "--out", tmp_path / "out")
    assert result["loss_after"] > result["loss_before"] + 0.05
    layer, rise = result["worst_layer"]
    words = f"layer {layer} costs most (its heads alone +{100 * rise:.1f}%)"
    saf("report", tmp_path / "out", "--out", tmp_path / "page.html")
    assert all(words in path.read_text() for path in (tmp_path / "out" / "README.md", tmp_path / "page.html"))
    assert json.loads((tmp_path / "out" / "freezing.json").read_text())["loss_after"] == result["loss_after"]
    (cost,) = saf_json("inspect", tmp_path / "out")["costs"]
    assert (cost["loss_after"], cost["worst_layer"]) == (result["loss_after"], [layer, rise])
    assert cost["interval"][0] < cost["perplexity_rise"] == math.expm1(result["loss_after"] - result["loss_before"])
    (tmp_path / "out" / "events.jsonl").unlink()  # as in a folder that was saved again
    (kept,) = saf_json("inspect", tmp_path / "out")["costs"]
    assert (kept["perplexity_rise"], kept["interval"]) == (cost["perplexity_rise"], cost["interval"])
    assert signed(100 * kept["perplexity_rise"]) in saf("inspect", tmp_path / "out")[1]


def test_a_healed_model_is_reported_beside_the_ordinary_one_trained_alike(base, saf, saf_json, tmp_path):
    AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes((base / "model" / "tokenizer.json").read_bytes())
    words = ("freeze", tmp_path / "model", "--data", base / "text.txt", "--rate", 0.5, *WORDS, "--heal", 320)
    code, _, err = saf(*words, "--out", tmp_path / "none")
    assert (code, "trained alike" in err, (tmp_path / "none").exists()) == (2, True, False)
    result = saf_json(*words, "--accept-loss", "--out", tmp_path / "out")
    healing = result["healing"]
    assert healing["tokens"] == 20 * 15  # windows of plain text have 16 tokens, of which 15 are targets
    assert healing["loss_healed"] < healing["loss_frozen"] == pytest.approx(result["loss_after"], abs=1e-6)
    assert healing["loss_ordinary"] == pytest.approx(result["loss_before"], abs=1e-6)
    assert healing["loss_twin"] != healing["loss_ordinary"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert "trained alike (perplexity +" in (tmp_path / "out" / "README.md").read_text()
    windows = (len(train_bpe([TEXT], vocab_size=300).encode(TEXT)) + 1) // 16
    assert "needs more text" in saf(*words, "--sequences", windows - 1, "--out", tmp_path / "none")[2]


def test_the_loss_of_plain_text_is_that_of_a_window_that_did_not_calibrate(base, saf, saf_json, tmp_path):
    ids = torch.tensor(train_bpe([TEXT], vocab_size=300).encode(TEXT))
    windows = ids[: len(ids) // 16 * 16].view(-1, 16)
    count = (len(ids) + 1) // 16  # an end of text follows
    words = ("freeze", base / "model", "--data", base / "text.txt", "--count", 1, *WORDS[2:], "--sequences")
    result = saf_json(*words, count - 1, "--accept-loss", "--out", tmp_path / "out")
    frozen = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = frozen(windows, use_cache=False).logits[:, :-1].double()
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)
    assert float((losses - result["loss_after"]).abs().min()) < 1e-5
    code, _, err = saf(*words, count, "--out", tmp_path / "none")
    assert (code, f"pass --sequences {count - 1}, a smaller --length" in err) == (2, True)


def test_heads_stay_within_the_budget_or_nothing_is_written(base, saf, saf_json, tmp_path):
    (tmp_path / "short.txt").write_text("The quick brown fox.")
    words = ("freeze", base / "model", *WORDS, "--rate", 1, "--heldout-sequences", 4)
    text = ("--data", base / "text.txt")
    result = saf_json(*words, *text, "--budget", "10%", "--accept-loss", "--out", tmp_path / "out")
    assert 0 < result["joint_cost"]["rise"] <= 0.0954
    layer, head, _ = max(result["joint_cost"]["alone"], key=lambda each: each[2])
    none = (*text, "--budget", 1e-12, "--only", f"{layer}:{head}")
    for rest, expected in ((none, "raise budget"), (("--data", tmp_path / "short.txt"), "or more text")):
        code, out, err = saf(*words, *rest, "--out", tmp_path / "none")
        assert (code, out, expected in err, (tmp_path / "none").exists()) == (2, "", True, False)
