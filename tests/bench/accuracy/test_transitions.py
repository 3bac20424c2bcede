"""Errors after many changes of heads: small when edits are right, large when a state is not what its heads say."""

import pytest
import torch

from saf.bench import measure
from saf.bench.accuracy import transitions
from saf.bench.accuracy.errors import ErrorSettings, distance
from saf.bench.accuracy.transitions import states
from saf.bench.kinds import BENCHMARKS
from saf.errors import InputError
from saf.records.table import Table

SMALL = {"num_heads": 3, "head_dim": 8, "length": 17, "stored": 24, "batch_size": 2}


def errors(operations: int, seed: int = 0) -> list[float]:
    found = states(operations, **SMALL, backend="toeplitz", seed=seed, device=torch.device("cpu"))
    return [distance(state.found, state.exact)["relative_l2"] for state in found]


def test_every_state_is_that_of_a_model_made_afresh(monkeypatch):
    seen = []
    edit = transitions._edit
    monkeypatch.setattr(
        transitions, "_edit", lambda model, kinds, *rest: (seen.append(dict(kinds)), edit(model, kinds, *rest))
    )
    found = errors(12)
    assert len(found) == 13
    assert max(found) < 2e-6
    assert {"frozen", "pruned", "live"} <= {kind for kinds in seen for kind in kinds.values()}


def test_a_state_that_is_not_what_its_heads_say_shows(monkeypatch):
    monkeypatch.setattr(transitions, "uninstall_", lambda model, heads: None)
    found = states(12, **SMALL, backend="toeplitz", seed=0, device=torch.device("cpu"))
    # An undo that did nothing is seen in the very next state, before another operation meets its heads.
    assert any(distance(state.found, state.exact)["relative_l2"] > 1e-5 for state in found)


def test_the_record_has_a_row_with_its_limit(said):
    shape = {name: value for name, value in SMALL.items() if name != "num_heads"} | {"num_heads": 3, "frozen": (1,)}
    settings = ErrorSettings(device="cpu", backends=("toeplitz",), precisions=("fp32",), transitions=5, **shape)
    record = measure(settings, say=said.append)
    (row,) = [row for row in record["rows"] if row["part"] == "transitions"]
    assert row["tensor"] == "logits, worst of 5"
    assert row["within"]
    shown = [part.title for part in BENCHMARKS["errors"].tables(record) if isinstance(part, Table)]
    assert any("after each freezing" in title for title in shown)
    with pytest.raises(InputError, match="without fp32"):
        ErrorSettings(precisions=("bf16",), transitions=5)
