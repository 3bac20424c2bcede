"""The settings of an event: what is refused, and what JSON and generators leave of them."""

import json

import pytest
import torch

import saf
from saf.errors import InputError
from saf.records.events import read_events
from tests.freezing.small_model import make, tokens


def test_settings_survive_json():
    config = saf.FreezeConfig(heads=((1, 2), (0, 3)), pattern="dirichlet", pattern_options={"scale": 4.0}, seed=5)
    for each in (config, saf.FreezeConfig(count=3, exclude=((0, 0),), max_per_layer=2)):
        assert saf.FreezeConfig(**json.loads(json.dumps(each.to_dict()))) == each


def test_a_generator_gives_the_event_one_seed_that_is_kept(tmp_path):
    generator, ids = torch.Generator().manual_seed(1), tokens()
    first, second = (saf.FreezeConfig(pattern="gaussian", max_fit_kl=100, seed=generator) for _ in range(2))
    assert first.seed != second.seed
    assert saf.FreezeConfig(**json.loads(json.dumps(first.to_dict()))) == first
    one, again, other = (saf.freeze_(make(2.0), [ids], config) for config in (first, first, second))
    assert torch.equal(one.patterns.alpha, again.patterns.alpha)
    assert not torch.equal(one.patterns.alpha, other.patterns.alpha)
    one.save(tmp_path)
    recorded = read_events(tmp_path)[0].values["config"]
    assert torch.equal(saf.freeze_(make(2.0), [ids], saf.FreezeConfig(**recorded)).patterns.alpha, one.patterns.alpha)
    own = saf.FreezeConfig(pattern="gaussian", pattern_options={"seed": torch.Generator().manual_seed(1)})
    assert own.pattern_options == {"seed": first.seed}


def test_bad_settings_are_refused():
    for options, message in [
        ({"rate": 1.2}, "from 0 to 1"),
        ({"score": "magic"}, "score must be one of variance, .* got 'magic'"),
        ({"pattern": "median"}, "pattern must be one of"),
        ({"fitter": "newton"}, "fitter must be one of"),
        ({"fitter_options": {"sweeps": 3}}, "fitter 'proportional' takes .* got sweeps"),
        ({"max_fit_kl": 0}, "positive"),
        ({"storage": "sparse"}, "storage must be one of compact, exponential"),
        ({"storage": "dense", "fitter": "adam"}, "every entry, and nothing is fitted: leave the fitter out"),
        ({"storage": "dense", "fitter_options": {"max_sweeps": 3}}, "nothing is fitted: leave the fitter out"),
        ({"storage": "dense_bfloat16", "max_fit_kl": 0.1}, "nothing is fitted: leave max_fit_kl out"),
        (
            {"pattern": "structured_random", "fitter": "adam", "max_fit_kl": 0.1},
            "compact by nature, and nothing is fitted: leave max_fit_kl and the fitter out",
        ),
        ({"match": "magic"}, "match must be one of"),
        ({"pattern_options": {"scale": 2}}, "'mean' takes no options"),
        ({"match": "variance"}, "match has no effect where heads are chosen by 'variance' anyway"),
        ({"score": "random", "match": "variance", "max_per_layer": 2}, "leave heads and max_per_layer out"),
        ({"max_per_layer": 0}, "at least 1; got 0"),
        ({"count": -1}, "0 or more; got -1"),
        ({"seed": -1}, "integer from 0 on"),
        ({"heads": ((0, 1),), "count": 1, "max_per_layer": 1}, "leave count and max_per_layer out"),
        ({"heads": ((0, 1),), "exclude": ((0, 0),)}, "leave exclude out"),
        ({"heads": ((0, 1), (0, 1))}, "names each head once"),
        ({"match_heads": ((0, 1),), "match": "variance"}, "match_heads sets the number .* leave match out"),
        ({"heads": ((0, 1),), "only": ((0, 1),), "below": 1.0}, "leave only and below out"),
    ]:
        with pytest.raises(InputError, match=message):
            saf.FreezeConfig(**options)
