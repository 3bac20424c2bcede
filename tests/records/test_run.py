"""Reading the folder of a run."""

import json
from pathlib import Path

import pytest

from saf.errors import InputError
from saf.records.run import RecordedRun
from tests.report.synthetic import write_run

RESULTS = Path(__file__).parents[2] / "results"


def test_a_resumed_run_counts_each_update_once_and_a_torn_last_line_is_ignored(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    again = json.dumps(json.loads(lines[-1]) | {"loss": 1.5})
    path.write_text("\n".join([*lines, again, '{"update": 61, "lo']))
    metrics = RecordedRun.open(folder).metrics
    assert len(metrics) == 60
    assert metrics[-1]["loss"] == 1.5


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(InputError, match="holds nothing that saf writes; expected a run"):
        RecordedRun.open(tmp_path)
    with pytest.raises(InputError, match="absent does not exist; expected a run"):
        RecordedRun.open(tmp_path / "absent")


def test_a_committed_run_is_read():
    run = RecordedRun.open(RESULTS / "124m-4k" / "frozen25")
    assert (run.arm, run.freeze_update, len(run.frozen_heads), run.num_heads) == ("frozen", 320, 36, 144)
    assert run.finished_result()["kind"] == "run"
    assert run.finished_result()["provenance"]["checkpoints"].keys() == {"parent", "final"}
    assert run.evaluation is not None
    assert run.evaluation["kind"] == "evaluation"
