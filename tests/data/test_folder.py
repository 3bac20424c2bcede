import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from saf.data import TokenData, prepare
from saf.data.folder import new_folder
from saf.errors import DataError

ROOT = Path(__file__).parents[2]


def test_a_finished_folder_is_kept_unless_told_otherwise(corpus, settings, tmp_path):
    out = tmp_path / "data"
    first = prepare(corpus, out, **settings)
    with pytest.raises(DataError, match="a finished data folder is there"):
        prepare(corpus, out, **settings, seed=1)
    assert TokenData.open(out, verify=True).fingerprint == first.fingerprint
    second = prepare(corpus, out, **settings, seed=1, overwrite=True)
    assert TokenData.open(out, verify=True).fingerprint == second.fingerprint != first.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failed_overwrite_keeps_the_old_folder(corpus, settings, tmp_path, monkeypatch):
    out = tmp_path / "data"
    first = prepare(corpus, out, **settings)
    monkeypatch.setattr("saf.data.folder.flush_folder", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(corpus, out, **settings, seed=1, overwrite=True)
    assert TokenData.open(out, verify=True).fingerprint == first.fingerprint


def test_other_peoples_files_are_never_replaced(corpus, settings, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="something that is not a data folder is there"):
            prepare(corpus, tmp_path, **settings, overwrite=overwrite)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_filled(corpus, settings, tmp_path):
    (tmp_path / "data").mkdir()
    prepare(corpus, tmp_path / "data", **settings)
    TokenData.open(tmp_path / "data", verify=True)


def test_what_a_kill_left_is_cleared_away(corpus, settings, tmp_path):
    partial = tmp_path / ".data.partial"
    partial.mkdir()
    (partial / "train-00077.bin").write_bytes(b"half")
    (tmp_path / ".data.lock").write_text("")
    prepare(corpus, tmp_path / "data", **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert not (tmp_path / "data" / "train-00077.bin").exists()


def test_a_kill_between_the_two_renames_loses_nothing(corpus, settings, tmp_path):
    first = prepare(corpus, tmp_path / "data", **settings)
    (tmp_path / "data").rename(tmp_path / ".data.replaced")
    with pytest.raises(DataError, match="a finished data folder is there"):
        prepare(corpus, tmp_path / "data", **settings, seed=1)
    assert TokenData.open(tmp_path / "data").fingerprint == first.fingerprint


def test_two_writers_of_one_folder(tmp_path):
    with new_folder(tmp_path / "data", overwrite=False) as partial:
        with (
            pytest.raises(DataError, match="another process is preparing this folder"),
            new_folder(tmp_path / "data", overwrite=False),
        ):
            pytest.fail("the second writer got in")
        (partial / "index.json").write_text("{}")
    assert (tmp_path / "data" / "index.json").read_text() == "{}"


def test_a_killed_process_leaves_no_folder_and_no_workers(corpus, tmp_path):
    script = (
        "import sys, time\n"
        "import saf.data.preparation as preparation\n"
        "from saf.data.encoding import EncodePool\n"
        "encode = EncodePool.encode\n"
        "def slow(pool, documents):\n"
        "    for number, pair in enumerate(encode(pool, documents)):\n"
        "        if number == 3:\n"
        "            print(*[worker.process.pid for worker in pool.workers], flush=True)\n"
        "            time.sleep(60)\n"
        "        yield pair\n"
        "EncodePool.encode = slow\n"
        "preparation.prepare(sys.argv[1], sys.argv[2], vocab_size=300, workers=1)\n"
    )
    command = [sys.executable, "-c", script, str(corpus), str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline().split()[0])
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "data").exists()
    for _ in range(100):
        if not running(worker):
            break
        time.sleep(0.05)
    assert not running(worker), "the worker ends with its parent"
    prepare(corpus, tmp_path / "data", vocab_size=300, heldout_fraction=0.3, workers=1)
    TokenData.open(tmp_path / "data", verify=True)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
