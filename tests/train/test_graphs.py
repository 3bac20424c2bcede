"""Bookkeeping of passes as CUDA graphs, with a stand-in that calls what it recorded; tests/gpu captures some."""

import copy
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import saf
import saf.train.graphs as graphs
import saf.train.loop as loop
from saf.cli.training import result_table
from saf.errors import SafWarning, UnsupportedError
from saf.freeze_config import FreezeConfig
from saf.heads import HeadSet
from saf.machine.execution import Execution
from saf.patterns import CompactPattern
from saf.records.files import read_json
from saf.surgery import install_
from saf.train import pretrain
from saf.train.graphs import check_graphs, graphs_pay
from saf.train.optimizer import build_optimizer
from saf.train.updater import Updater
from tests.ops.counted_graphs import CountedGraphs
from tests.train.killed import Killed, die_at

CPU = Execution.of("cpu")


class Recorded:
    """Call again what a graph would replay; warm-ups run, as they do before a capture."""

    def __init__(self, call, *, device, pool, warmup=3, same_stream=False):
        assert same_stream, "graphs of several streams share no memory"
        for _ in range(warmup):
            self.outcome = call()
        self.call = call

    def __call__(self):
        self.outcome.copy_(self.call())


class Batches:
    """Hand out micro-batches of these lengths, the same ones for the same seed."""

    def __init__(self, lengths, seed=0):
        drawn = torch.Generator().manual_seed(seed)
        both = [torch.randint(0, 64, (2, 4, length), generator=drawn) for length in lengths]
        self.left = [(inputs, targets.masked_fill(targets % 3 == 0, -100)) for inputs, targets in both]

    def take(self):
        return self.left.pop(0)


@pytest.fixture
def pair(monkeypatch):
    """Return a function that makes a plain updater and one of the same model with graphs."""
    monkeypatch.setattr(graphs, "GraphReplay", Recorded)
    monkeypatch.setattr("saf.train.updater.check_graphs", lambda *_, **__: None)

    def make(lengths, accumulation=1, execution=CPU):
        torch.manual_seed(0)
        model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32))
        install_(model, HeadSet([(0, 0), (1, 1)]), CompactPattern.from_parameters(*torch.randn(2, 2, 30)))
        found = []
        for graphed in (False, True):
            own = copy.deepcopy(model)
            settings = {"execution": execution, "accumulation": accumulation, "clip": 1.0, "graphed": graphed}
            found.append(Updater(model=own, optimizer=build_optimizer(own), batches=Batches(lengths), **settings))
        return found

    return make


def assert_same(plain, graphed, *, exact=True):
    for one, other in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        assert torch.equal(one, other) if exact else torch.allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_updates_are_those_of_plain_passes_bit_for_bit(pair, accumulation):
    lengths = [16, 8, 24, 8, 16, 16, 30, 24, 8, 8, 30, 16]  # as long as they are padded to
    plain, graphed = pair(lengths, accumulation)
    for _ in range(len(lengths) // accumulation):
        one, other = plain.update(1e-3), graphed.update(1e-3)
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert_same(plain, graphed)
    assert sorted(graphed.micro_batch.shapes) == [(4, 8), (4, 16), (4, 24), (4, 30)]


def test_padding_changes_no_more_than_rounding(pair):
    lengths = [5, 13, 9, 29, 27]
    plain, graphed = pair(lengths)
    for _ in lengths:
        one, other = plain.update(1e-3), graphed.update(1e-3)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert_same(plain, graphed, exact=False)
    # Of 27 and 29 tokens one graph, as long as the patterns reach; the first micro-batch ran as it is.
    assert graphed.micro_batch.shapes == [(4, 16), (4, 30)]


@pytest.mark.parametrize("compiled", [{"compile": True}, {"compile": True, "by_layer": True}], ids=["whole", "layers"])
def test_compiled_passes_are_captured_as_they_are_and_compiled_once(pair, monkeypatch, compiled):
    """Of one length, which padding would change; what is compiled before the first graph serves all of them."""
    counted = CountedGraphs()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    monkeypatch.setattr("saf.models.by_layer._programs", {})
    plain, graphed = pair([29] * 8, 2, replace(CPU, **compiled))
    losses, programs = [], []
    for updater in (plain, graphed):
        updater.compile_()  # which drops what another model compiled
        losses.append([])
        for _ in range(4):
            losses[-1].append(updater.update(1e-3)[:2])
            programs.append(len(counted.graphs))
    assert losses[0] == losses[1]
    assert_same(plain, graphed)
    assert graphed.micro_batch.shapes == [(4, 29)]
    # Layers of one layout share programs, whichever model they are of.
    assert programs == [programs[0]] * 4 + [programs[0] if "by_layer" in compiled else 2 * programs[0]] * 4


def test_an_event_and_moved_weights_throw_graphs_away(pair):
    lengths = [8] * 8
    plain, graphed = pair(lengths)
    for updater in (plain, graphed):
        updater.update(1e-3)
        updater.update(1e-3)
    assert graphed.micro_batch.shapes == [(4, 8)]
    pool = graphed.micro_batch._pool
    for updater in (plain, graphed):
        pattern = CompactPattern.from_parameters(*torch.zeros(2, 1, 30))
        install_(updater.model, HeadSet([(2, 3)]), pattern, optimizer=updater.optimizer)
        updater.compile_()
    assert graphed.micro_batch.shapes == []
    for updater in (plain, graphed):
        updater.update(1e-3)
        updater.update(1e-3)
    assert graphed.micro_batch.shapes == [(4, 8)]
    assert graphed.micro_batch._pool is not pool
    for updater in (plain, graphed):
        weight = updater.model.norm.weight
        weight.data = weight.data.clone()
        updater.update(1e-3)
    assert graphed.micro_batch.shapes == []
    plain.update(1e-3)
    graphed.update(1e-3)
    assert_same(plain, graphed)


def test_gradients_that_others_made_or_took_away_are_gone_on_from(pair):
    plain, graphed = pair([8, 8, 8])
    for updater in (plain, graphed):
        parts = [updater.batches.take() for _ in range(3)]
        updater.micro_batch(*parts[0])
        updater.micro_batch(*parts[1])
        for parameter in updater.model.parameters():
            parameter.grad = parameter.grad.clone()
        updater.model.norm.weight.grad = None
        updater.micro_batch(*parts[2])
    for one, other in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_first_pass_that_failed_is_made_again(pair):
    plain, graphed = pair([8, 8, 8])
    run, parts = graphed.micro_batch._run, [graphed.batches.take() for _ in range(3)]

    def fail(*_):
        raise RuntimeError("out of memory")

    graphed.micro_batch._run = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        graphed.micro_batch(*parts[0])
    graphed.micro_batch._run = run
    for own in parts:
        plain.micro_batch(*plain.batches.take())
        graphed.micro_batch(*own)
    for one, other in zip(plain.model.parameters(), graphed.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_gradient_that_the_first_micro_batch_did_not_have_is_refused(pair):
    graphed = pair([8, 8])[1]
    first, second = (graphed.batches.take() for _ in range(2))
    weight = graphed.model.norm.weight
    weight.requires_grad_(False)
    graphed.micro_batch(*first)
    weight.requires_grad_()
    kept = [p.grad.clone() for p in graphed.model.parameters() if p is not weight]
    with pytest.raises(UnsupportedError, match=r"norm\.weight has a gradient in some of them alone"):
        graphed.micro_batch(*second)
    assert weight.grad is None
    left = [p.grad for p in graphed.model.parameters() if p is not weight]
    assert all(map(torch.equal, left, kept)), "as they were before the warm-ups"


def test_shapes_beyond_the_most_run_as_they_are_and_are_counted(pair):
    lengths = [8, 8, 16, 24, 24]
    plain, graphed = pair(lengths)
    graphed.micro_batch._most = 2
    for _ in lengths[:3]:
        assert plain.update(1e-3) == graphed.update(1e-3)._replace(seconds=pytest.approx(0, abs=1e9))
    with pytest.warns(SafWarning, match="2 shapes of micro-batches have a CUDA graph each"):
        graphed.update(1e-3)
    graphed.update(1e-3)
    assert graphed.micro_batch.uncaptured == 2
    plain.update(1e-3)
    plain.update(1e-3)
    assert_same(plain, graphed)


def test_a_run_is_that_of_plain_passes_and_goes_on_either_way(settings, outcome, monkeypatch):
    """Across a freeze, and stopped behind it; windows of 32 tokens are not padded."""
    made: list[Recorded] = []
    monkeypatch.setattr(graphs, "GraphReplay", lambda *one, **more: made.append(Recorded(*one, **more)) or made[-1])
    for module in ("start", "updater"):
        monkeypatch.setattr(f"saf.train.{module}.check_graphs", lambda *_, **__: None)
    freeze = FreezeConfig(rate=0.25, max_fit_kl=10.0)
    plain, graphed = (
        settings(name, freeze=freeze, graphs="on" if name == "graphed" else "off") for name in ("plain", "graphed")
    )
    pretrain(plain)
    assert not made
    pretrain(graphed)
    assert len(made) == 2, "one graph before the freeze and one behind it"
    expected = outcome(plain.out)
    assert outcome(graphed.out) == expected
    told = [read_json(Path(run.out, "result.json")) for run in (plain, graphed)]
    assert [one["graphs"] for one in told] == [None, {"micro_batches": 24, "uncaptured": 0}]
    for step in ("step-9", "step-12"):
        shutil.rmtree(Path(graphed.out, "checkpoints", step))
    Path(graphed.out, "result.json").unlink()
    pretrain(replace(graphed, graphs="off"), resume=True)
    assert outcome(graphed.out) == expected


def test_a_run_tells_how_many_micro_batches_had_no_graph_across_an_event_and_a_resumption(settings, monkeypatch):
    """None is kept here; the first micro-batch, and the one behind the event, run as they are anyway."""
    monkeypatch.setattr(graphs.GraphedPasses.__init__, "__kwdefaults__", {"most": 0})
    for module in ("start", "updater"):
        monkeypatch.setattr(f"saf.train.{module}.check_graphs", lambda *_, **__: None)
    config = settings("graphed", freeze=FreezeConfig(rate=0.25, max_fit_kl=10.0), graphs="on")
    with monkeypatch.context() as patch:
        die_at(patch, loop, "run_update", 11)
        with pytest.raises(Killed), pytest.warns(SafWarning, match="have a CUDA graph each"):
            pretrain(config)
    with pytest.warns(SafWarning, match="have a CUDA graph each"):
        result = pretrain(config, resume=True)
    # Of 12 updates with two micro-batches those at the beginning, behind the event and behind the resumption.
    assert result["graphs"] == {"micro_batches": 24, "uncaptured": 24 - 3}
    assert "21 of 24 micro-batches" in str(result_table(result))


def test_runs_that_cannot_be_captured_leave_no_folder(settings):
    for changes, why in (({}, "they need a CUDA device"), ({"compile": "on"}, "need a CUDA device")):
        with pytest.raises(UnsupportedError, match=why):
            pretrain(settings(graphs="on", **changes))
        assert not Path(settings().out).exists()
    cuda = replace(CPU, device=torch.device("cuda"))
    check_graphs(cuda, "none", trained_patterns=False)
    for execution, kind, trained, why in (
        (cuda, "ddp", False, "one process"),
        (replace(cuda, activation_checkpointing=True), "none", False, "leave activation_checkpointing out"),
        (cuda, "none", True, "freeze with fixed ones"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            check_graphs(execution, kind, trained_patterns=trained)
    check_graphs(replace(cuda, compile=True), "none", trained_patterns=False)
    with pytest.raises(UnsupportedError, match="every length of micro-batches is a program; pass compile='off'"):
        check_graphs(replace(cuda, compile=True), "none", trained_patterns=False, many_lengths=True)


def test_few_tokens_of_one_length_are_replayed_where_a_run_leaves_it_open():
    cuda, two = replace(CPU, device=torch.device("cuda"), compile=True), 2 * 4096 * 768
    assert graphs_pay(cuda, "none", size=two, trained_patterns=False), "two sequences of 4K of the 124M model"
    assert not graphs_pay(cuda, "none", size=two + 768, trained_patterns=False)
    alone = replace(cuda, compile=False)
    assert not graphs_pay(alone, "none", size=two, trained_patterns=False, many_lengths=True)
    for execution, kind, trained in ((CPU, "none", False), (cuda, "ddp", False), (cuda, "none", True)):
        assert not graphs_pay(execution, kind, size=two, trained_patterns=trained)


def test_a_run_says_that_it_replays_graphs_unasked(settings, monkeypatch, capsys):
    monkeypatch.setattr(graphs, "GraphReplay", Recorded)
    monkeypatch.setattr(graphs, "_obstacle", lambda *_, **__: None)
    asked = settings("open", quiet=False)
    assert asked.graphs == "auto"
    told = pretrain(asked)["graphs"]
    assert told["micro_batches"] == 24
    assert "few for this device: their passes are replayed as CUDA graphs; --graphs off" in _words(capsys)
    assert pretrain(settings("called", graphs="off", quiet=False))["graphs"] is None
    assert "CUDA graphs" not in _words(capsys)


def _words(capsys) -> str:
    """Return what was said, whatever the terminal's width."""
    said = capsys.readouterr()
    return " ".join((said.out + said.err).split())


def test_what_cannot_be_captured_is_refused():
    model = saf.GPT(saf.preset("tiny", vocab_size=64, max_length=32))
    with pytest.raises(UnsupportedError, match="CUDA graphs: they need a CUDA device, and updates run on cpu"):
        Updater(
            model=model,
            optimizer=build_optimizer(model),
            batches=Batches([8]),
            execution=CPU,
            accumulation=1,
            clip=1.0,
            graphed=True,
        )
