"""`saf inspect` on every kind of folder, and on damaged ones."""

import shutil

import torch

from saf.heads import HeadSet
from saf.models import GPT, GPTConfig
from saf.patterns import CompactPattern, DensePattern
from saf.saving import save
from saf.surgery import install_
from saf.train import load_model
from tests.ops.exponential_patterns import exponential_patterns

LENGTH = 64


def test_patterns_are_counted_by_kind(saf_json, tmp_path):
    model = GPT(GPTConfig(vocab_size=40, num_layers=2, num_heads=5, hidden_size=40, max_length=LENGTH))
    soft = CompactPattern.from_parameters(torch.zeros(LENGTH), -0.1 * torch.arange(LENGTH))
    fast = exponential_patterns(1, LENGTH, band=16, sinks=8)[0]
    install_(model, HeadSet([(0, 0), (0, 1)]), [fast, soft])
    install_(model, HeadSet([(1, 2)]), [DensePattern(soft.dense())])
    save(model, tmp_path)
    inspected = saf_json("inspect", tmp_path)
    assert [layer["kinds"] for layer in inspected["patterns"]] == [{"exponential": 1, "compact": 1}, {"dense": 1}]
    sizes = [tensor.nbytes for one in (fast, soft, DensePattern(soft.dense())) for tensor in one.state().values()]
    assert inspected["storage"]["parameters"] == sum(sizes)


def test_every_folder_is_described(saf_json, arms, text_data, tmp_path):
    ordinary, frozen = arms
    run = saf_json("inspect", frozen)
    assert (run["kind"], run["arm"], run["finished"], run["verified"]) == ("run", "frozen", True, True)
    assert (len(run["frozen"]), run["num_heads"], run["updates"]) == (2, 8, 24)
    assert [(event["kind"], event["update"], event["undone_by"]) for event in run["events"]] == [("freeze", 12, None)]
    checkpoint = saf_json("inspect", frozen / "checkpoints" / "step-24")
    assert (checkpoint["kind"], checkpoint["update"], checkpoint["frozen"]) == ("checkpoint", 24, run["frozen"])
    assert checkpoint["hash"] == run["provenance"]["checkpoints"]["final"]
    assert checkpoint["storage"]["compact"] == 2 * 3 * 4 * checkpoint["patterns"][0]["length"]
    assert checkpoint["parent"] == saf_json("inspect", ordinary / "checkpoints" / "step-12")["hash"]
    data = saf_json("inspect", text_data)
    assert (data["kind"], data["verified"], data["fingerprint"]) == ("data", True, checkpoint["data_fingerprint"])
    save(load_model(frozen / "checkpoints" / "step-24"), tmp_path / "saved")
    saved = saf_json("inspect", tmp_path / "saved")
    assert (saved["kind"], saved["verified"], saved["frozen"]) == ("saved", True, run["frozen"])
    assert saved["patterns"] == checkpoint["patterns"]


def test_a_damaged_file_is_named(saf, arms, tmp_path):
    run = shutil.copytree(arms[0], tmp_path / "run")
    weights = run / "checkpoints" / "step-24" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for path in (run, weights.parent):
        code, _, err = saf("inspect", path)
        assert (code, f"{weights} is damaged" in err) == (2, True)
