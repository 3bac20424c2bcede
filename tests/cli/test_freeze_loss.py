"""`saf freeze` measures what it costs: a model that it would destroy is refused, and nothing is written."""

import json
import math

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

import saf.integrations.transformers  # noqa: F401
from saf.data.tokenizer import train_bpe
from saf.records.table import signed
from tests.cli.conftest import TEXT

WORDS = ("--sequences", 4, "--batch-size", 2, "--length", 16, "--max-fit-kl", 100, "--device", "cpu")


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
    assert (kept["perplexity_rise"], kept["interval"]) == (cost["perplexity_rise"], None)
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
