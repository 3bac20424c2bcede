"""`saf inspect` on every kind of folder, and on damaged ones."""

import shutil

from saf.records.run import append_event
from saf.saving import load, save


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
    save(load(frozen / "checkpoints" / "step-24"), tmp_path / "saved")
    saved = saf_json("inspect", tmp_path / "saved")
    assert (saved["kind"], saved["verified"], saved["frozen"]) == ("saved", True, run["frozen"])
    assert saved["patterns"] == checkpoint["patterns"]
    assert sum(layer["kinds"]["compact"] for layer in saved["patterns"]) == 2
    for kind, loss in (("freeze", 2.0), ("undo", 1.0), ("freeze", 3.0)):
        append_event(tmp_path / "saved", kind, {"heads": run["frozen"], "loss_before": 1.0, "loss_after": loss})
    assert [cost["loss_after"] for cost in saf_json("inspect", tmp_path / "saved")["costs"]] == [3.0]


def test_a_damaged_file_is_named(saf, arms, tmp_path):
    run = shutil.copytree(arms[0], tmp_path / "run")
    weights = run / "checkpoints" / "step-24" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for path in (run, weights.parent):
        code, _, err = saf("inspect", path)
        assert (code, f"{weights} is damaged" in err) == (2, True)
