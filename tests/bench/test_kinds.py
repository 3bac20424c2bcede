"""The registry of kinds: names, settings, and what every record of a kind can be asked."""

import pytest

from saf.bench.kinds import BENCHMARKS, KINDS, MODEL_KINDS, SPEED_KINDS, compares_arms, groups_of
from saf.bench.model.compiling import CompileKind
from saf.bench.model.nanogpt import NanoGPTKind


@pytest.mark.parametrize("name", BENCHMARKS)
def test_settings_name_their_kind(name):
    assert BENCHMARKS[name].settings.kind == BENCHMARKS[name].name == name


def test_every_kind_is_known_by_its_name_and_has_a_title_of_its_own():
    assert set(KINDS) == {*BENCHMARKS, NanoGPTKind.name, CompileKind.name}
    assert len({kind.title for kind in KINDS.values()}) == len(KINDS)
    assert set(MODEL_KINDS) < set(SPEED_KINDS) < set(BENCHMARKS)


def test_records_of_other_kinds_have_no_arms_to_compare():
    assert not compares_arms({"kind": "errors"})
    assert not compares_arms({})
    assert groups_of({"kind": "novelty", "rows": [{}]}) == []


def test_grids_have_rates_and_points():
    for kind in SPEED_KINDS.values():
        for grid in kind.grids:
            settings = kind.settings(grid=grid)
            assert kind.points(settings)
            assert all(0 < rate < 1 for rate in kind.rates(settings))
        assert set(kind.grid_rates) <= set(kind.grids)
