"""Several processes freeze alike: the first one decides for all."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

import saf
from saf.calibration.streaming import LayerStatistics
from saf.distributed import on_rank0
from saf.errors import SafError, SelectionError
from saf.patterns import CompactPattern
from saf.records.files import tensors_hash
from tests.train.helpers import together

LENGTH, WORLD = 24, 2


def model_of_all() -> saf.GPT:
    model = saf.GPT(saf.preset("tiny", num_layers=3, vocab_size=64, max_length=LENGTH))
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model


def process(rank: int, folder: str) -> None:
    """Freeze in one of several processes, each with its own batches, and write what came of it."""
    own = torch.randint(0, 64, (4, LENGTH), generator=torch.Generator().manual_seed(rank))
    answers = {}
    for name, error in (("known", SelectionError("too few")), ("strange", _Unpicklable())):
        try:
            on_rank0(lambda error=error: _fail(error))
        except Exception as caught:
            answers[name] = [type(caught).__name__, str(caught)]
    model = model_of_all()
    report = saf.freeze_(model, [own], saf.FreezeConfig(rate=0.25, max_fit_kl=9))
    assert isinstance(report.patterns, CompactPattern)
    answers |= {
        "heads": report.heads.to_list(),
        "alpha": report.patterns.alpha.tolist(),
        "sequences": report.statistics.sequences_hash,
        "statistics": sums(report.statistics),
        "seconds": sorted(report.seconds),
        "output": model(own[:1] * 0)[0].sum().item(),
        "own": own.sum().item(),
        "late": waited(seconds=0.2),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(answers))


def waited(*, seconds: float) -> str:
    """Return the outcome of work that takes longer than the group, all of which has met, lets a message take."""
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    return on_rank0(lambda: time.sleep(5 * seconds) or "done")


def sums(statistics: saf.AttentionStatistics) -> str:
    """Return the SHA-256 of all that was measured of all heads."""
    return tensors_hash({name: getattr(statistics, name) for name in LayerStatistics._fields})


class _Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def _fail(error: Exception) -> None:
    raise error


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each process wrote."""
    if not distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    folder = tmp_path_factory.mktemp("processes")
    together(WORLD, process, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def test_every_process_installs_what_the_first_decided(answers):
    first, second = answers
    assert first["own"] != second["own"]
    assert {name: first[name] for name in first if name not in ("own", "strange")} == {
        name: second[name] for name in second if name not in ("own", "strange")
    }
    assert first["known"] == ["SelectionError", "too few"]
    assert first["strange"] == ["_Unpicklable", "holds a lock"]
    assert second["strange"] == ["SafError", "process 0 failed: _Unpicklable: holds a lock"]
    assert {"capture", "gather", "fit", "install"} <= set(first["seconds"])
    # One process alone, with the first one's batches, comes to the same.
    own = torch.randint(0, 64, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    alone = saf.freeze_(model_of_all(), [own], saf.FreezeConfig(rate=0.25, max_fit_kl=9))
    assert alone.heads.to_list() == first["heads"]
    # Six heads were measured by each process, those of the middle layer by both: the same bits.
    assert sums(alone.statistics) == first["statistics"]
    torch.testing.assert_close(alone.patterns.alpha, torch.tensor(first["alpha"], dtype=alone.patterns.alpha.dtype))


def test_work_may_take_longer_than_the_group_lets_a_message_take(answers):
    assert [answer["late"] for answer in answers] == ["done", "done"]


def test_without_a_group_the_work_is_just_done():
    assert on_rank0(lambda: 3) == 3
    with pytest.raises(SafError):
        on_rank0(lambda: _fail(SelectionError("none")))
