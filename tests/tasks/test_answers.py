"""Likelihoods of choices against a computation one by one; records of answers, and two of them by hand."""

import pytest
import torch

import saf
from saf.bench.models import synthetic_patterns
from saf.compare import compare_zero_shot, pair_tables, verdict
from saf.errors import CompareError, DivergenceError, InputError
from saf.models import GPT, GPTConfig
from saf.records.table import markdown_of
from saf.tasks.base import Continuation, likelihoods
from saf.tasks.zero_shot import TaskAnswers, read_zero_shot, zero_shot_record, zero_shot_tables

LENGTH, VOCAB = 24, 40


@pytest.fixture
def model() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=VOCAB, num_layers=2, num_heads=4, hidden_size=32, max_length=LENGTH))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def pairs(rng) -> list[Continuation]:
    """Contexts of many lengths with choices of one to four tokens, and one with every token."""
    results = []
    for context in rng.integers(1, 18, size=20):
        tokens = tuple(rng.integers(0, VOCAB, size=context).tolist())
        results += [Continuation(tokens, tuple(rng.integers(0, VOCAB, size=n).tolist())) for n in (1, 1, 3, 4)]
    return [*results, *(Continuation((1, 2, 3), (token,)) for token in range(VOCAB))]


def one_by_one(model: GPT, pairs: list[Continuation]) -> tuple[list[float], list[bool]]:
    """Sums of log-probabilities, and whether each token is the most likely one, a sequence at a time in float64."""
    sums, greedy = [], []
    for one in pairs:
        ids = torch.tensor([*one.context, *one.tokens])
        with torch.no_grad():
            rows = model(ids[None, :-1])[0].log_softmax(-1)[len(one.context) - 1 :]
        sums.append(float(rows.gather(1, ids[len(one.context) :, None]).sum()))
        greedy.append(torch.equal(rows.argmax(-1), ids[len(one.context) :]))
    return sums, greedy


@pytest.mark.parametrize("frozen", [False, True], ids=["ordinary", "frozen"])
def test_batches_have_one_length_and_the_likelihoods_of_single_sequences(model, pairs, frozen):
    if frozen:
        heads = saf.HeadSet([(0, 1), (0, 2), (1, 3)])
        saf.install_(model, heads, synthetic_patterns(3, LENGTH, torch.Generator().manual_seed(0)))
    seen: list[torch.Tensor] = []
    handle = model.embed.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    results = likelihoods(model.train(), pairs, batch_size=3)
    handle.remove()
    assert model.training
    # The model reads each sequence once and whole: nothing is left for padding.
    rows = [tuple(row) for batch in seen for row in batch.tolist()]
    assert sorted(rows) == sorted({one.inputs for one in pairs})
    assert len(rows) < len(pairs)
    assert max(map(len, seen)) == 3
    sums, greedy = one_by_one(model.double().eval(), pairs)
    assert [one.log_prob for one in results] == pytest.approx(sums, rel=1e-4, abs=1e-4)
    assert [one.greedy for one in results] == greedy
    assert sum(greedy[-VOCAB:]) == 1


def test_what_has_no_likelihood_is_refused(model):
    with pytest.raises(InputError, match="must have a token or more"):
        likelihoods(model, [Continuation((1,), ())])
    with pytest.raises(InputError, match="at most 24 tokens, got 25"):
        likelihoods(model, [Continuation((1,) * 25, (2,))])
    with torch.no_grad():
        model.embed.weight[2] = torch.nan
    with pytest.raises(DivergenceError, match="not finite"):
        likelihoods(model, [Continuation((1,), (2,))])


# --- records


def answers(taken: str, right: str, **more) -> list[dict]:
    """Answers by the numbers of choices taken and right, a digit a question."""
    common = {"shortened": False, "log_probs": [0.0], **more}
    return [
        {"id": str(n), "answer": int(b), "taken": int(a), "right": a == b, **common}
        for n, (a, b) in enumerate(zip(taken, right, strict=True))
    ]


ORDINARY = {"architecture": "llama", "vocab_size": 9, "heads_by_layer": [2], "frozen": 0, "pruned": 0}
FROZEN = ORDINARY | {"frozen": 1}


def evaluation(folder, *, longest: int = 8, precision: str = "fp32", of: dict = FROZEN, checkpoints=None, **tasks):
    labels = {"sst2": ("negative", "positive")}
    made = {name: TaskAnswers.of(each, labels=list(labels.get(name, ())), version="1") for name, each in tasks.items()}
    head = {"out": folder, "checkpoints": checkpoints}
    return zero_shot_record(made, {}, facts={"longest": longest, "precision": precision, "of": of}, **head)


def test_two_evaluations_are_paired_by_question(tmp_path):
    right = {"sst2": "1111100000", "piqa": "0101010101"}
    record = evaluation(
        tmp_path / "a",
        sst2=answers("1111100011", right["sst2"]),
        piqa=answers("0101010101", right["piqa"], right_norm=True),
    )
    assert record["tasks"]["sst2"]["taken"] == {"0": 3, "1": 7}
    assert record["tasks"]["piqa"]["accuracy_norm"] == 1.0
    text = " ".join(map(markdown_of, zero_shot_tables(record)))
    assert "negative 3, positive 7" in text
    assert "A 5, B 5" in text
    # Two more are right in SST-2; six are lost and none gained in PIQA.
    evaluation(tmp_path / "b", sst2=answers("1111100000", right["sst2"]), piqa=answers("1010101101", right["piqa"]))
    found = compare_zero_shot(tmp_path / "a", tmp_path / "b")
    one, two = found["tasks"]["sst2"], found["tasks"]["piqa"]
    assert (one["gained"], one["lost"], one["difference"]) == (2, 0, pytest.approx(0.2))
    assert (two["gained"], two["lost"], two["difference"]) == (0, 7, pytest.approx(-0.7))
    assert (one["p_value"], two["p_value"]) == (pytest.approx(0.5), pytest.approx(2 / 128))
    assert (one["p_holm"], two["p_holm"]) == (pytest.approx(0.5), pytest.approx(2 * 2 / 128))
    assert found["mean_difference"] == pytest.approx(-0.25)
    assert one["taken"] == [{"0": 3, "1": 7}, {"0": 5, "1": 5}]
    # sd of the paired changes (eight 0, two 1) is 0.4: over the square root of ten questions.
    assert one["standard_error"] == pytest.approx(0.4 / 10**0.5)
    shown = " ".join(map(markdown_of, pair_tables(found)))
    assert "negative 5, positive 5 | negative 3, positive 7 | negative 5, positive 5" in shown
    assert "Mean change −25.00 points" in shown
    assert verdict(found).startswith("Cost: accuracy −25.00 points on average over 2 tasks, −70.00 (")


def test_what_cannot_be_paired_is_refused(tmp_path):
    same = answers("01", "01")
    evaluation(tmp_path / "a", sst2=same)
    others = {
        "differ in tasks": {"piqa": same},
        "different questions": {"sst2": answers("01", "11")},
        "differ in precision": {"sst2": same, "precision": "bf16"},
        "differ in longest": {"sst2": [{**one, "shortened": True} for one in same], "longest": 9},
    }
    for number, (words, settings) in enumerate(others.items()):
        evaluation(tmp_path / str(number), **settings)
        with pytest.raises(CompareError, match=words):
            compare_zero_shot(tmp_path / "a", tmp_path / str(number))
    evaluation(tmp_path / "longer", sst2=same, longest=9)
    assert compare_zero_shot(tmp_path / "a", tmp_path / "longer")["tasks"]["sst2"]["difference"] == 0
    refused = {
        "b has no frozen or pruned heads; name": {"of": ORDINARY},
        r"heads_by_layer: \[2\] in the ordinary arm, \[3\] in the frozen": {"of": FROZEN | {"heads_by_layer": [3]}},
        r"architecture: 'llama' in the ordinary arm, 'gemma2' in": {"of": FROZEN | {"architecture": "gemma2"}},
        "derived from ffff, which is not": {"checkpoints": {"model": "b", "parent": "ffff"}},
    }
    evaluation(tmp_path / "a", sst2=same, checkpoints={"model": "a", "parent": "0"})
    for words, settings in refused.items():
        evaluation(tmp_path / "b", sst2=same, **settings)
        with pytest.raises(CompareError, match=words):
            compare_zero_shot(tmp_path / "a", tmp_path / "b")
    found = compare_zero_shot(tmp_path / "a", tmp_path / "b", allow_differences=True)
    assert "parent: the frozen model was derived from ffff" in " ".join(pair_tables(found)[0].notes)
    # Frozen in the other one, in what that was frozen in, or in nothing that a file tells.
    for origin in ("a", "0", None):
        evaluation(tmp_path / "b", sst2=same, checkpoints={"model": "b", "parent": origin})
        assert compare_zero_shot(tmp_path / "a", tmp_path / "b")["differences"] == []
    with open(tmp_path / "a" / "zero_shot.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(InputError, match=r"zero_shot\.jsonl"):
        read_zero_shot(tmp_path / "a")
