"""Zero-shot accuracy with heads frozen by scores and rates, against models frozen one by one."""

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'saf[eval]'")

import saf
import saf.integrations.transformers
from experiments.analyses import analysis_figure, main
from experiments.analyses.zero_shot import ZeroShot
from saf.calibration.capture import measurable_heads
from saf.data import TextData, Tokenizer, calibration_windows, train_bpe
from saf.errors import InputError
from saf.hf.lm_eval import ExactLengthModel, answer_tasks
from saf.models.adapter import adapter_for
from saf.opening import Encoder
from saf.records.files import to_json
from saf.records.result import read_result
from tests.tasks.zero_shot_files import write_tasks
from tests.transformers_models import make

TEXT = "The quick brown fox jumps over the lazy dog, and a second one sleeps in its red or green den. " * 60
TASKS = ("sst2", "arc_easy")
LENGTH = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of six layers with grouped queries, its tokenizer, text, and tasks."""
    root = tmp_path_factory.mktemp("zero-shot")
    write_tasks(root / "tasks")
    model = make("qwen3", vocab_size=300, max_position_embeddings=LENGTH, num_hidden_layers=6)
    model.save_pretrained(root / "model")
    train_bpe([TEXT], vocab_size=300).save(root / "model")
    (root / "text.txt").write_text(TEXT)
    return root


def study(folder, **more) -> dict:
    settings = {"model": folder / "model", "data": folder / "text.txt", "tasks": TASKS, "task_data": folder / "tasks"}
    return ZeroShot(
        **{**settings, "sequences": 6, "rates": (0.25, 0.5), "max_fit_kl": 100.0, "device": "cpu", **more}
    ).measure()


@pytest.fixture(scope="module")
def record(folder):
    return study(folder)


def test_every_arm_is_the_model_frozen_by_its_score_and_rate(folder, record):
    tokenizer = Tokenizer.load(folder / "model")
    ids = calibration_windows(TextData(folder / "text.txt", tokenizer), length=LENGTH, count=6, seed=0)
    encoder = Encoder(tokenizer.encode, tokenizer.encode, tokenizer.eot_id)
    model = make("qwen3", vocab_size=300, max_position_embeddings=LENGTH, num_hidden_layers=6)
    before = answer_tasks(ExactLengthModel(model, encoder), TASKS, folder=folder / "tasks")
    report = saf.freeze_(model, list(ids.split(8)), saf.FreezeConfig(rate=0.5, max_fit_kl=100.0))
    after = answer_tasks(ExactLengthModel(model, encoder), TASKS, folder=folder / "tasks")
    assert [arm["name"] for arm in record["arms"]] == [
        "variance 25%",
        "variance 50%",
        "forward_kl 25%",
        "forward_kl 50%",
    ]
    arm, changes = record["arms"][1], []
    assert (arm["heads"], arm["share"]) == (report.heads.to_list(), len(report.heads) / 24)
    for name in TASKS:
        rights = [[answer["right"] for answer in of[name].answers] for of in (before, after)]
        assert arm["tasks"][name]["change"]["gained"] == sum(b and not a for a, b in zip(*rights, strict=True))
        assert arm["tasks"][name]["taken"] == after[name].record["taken"]
        changes.append((sum(rights[1]) - sum(rights[0])) / len(rights[0]))
    assert arm["mean_difference"] == pytest.approx(sum(changes) / 2)
    assert arm["layer_thirds"] == [sum(layer // 2 == third for layer, _ in report.heads) for third in range(3)]
    kls = torch.stack([report.statistics.forward_kl[head] for head in report.heads]).double()
    assert arm["forward_kl_median"] == pytest.approx(float(kls.quantile(0.5)), rel=1e-4)
    one, other = (set(map(tuple, record["arms"][number]["heads"])) for number in (0, 2))
    assert record["overlap"]["0.25"] == pytest.approx(len(one & other) / 6)
    assert record["ordinary"]["tasks"]["sst2"]["accuracy"] == before["sst2"].record["accuracy"]
    assert "arc_easy" in analysis_figure([record])


def test_a_study_goes_on_without_the_arms_that_it_has(folder, record, tmp_path, capsys):
    words = ["--data", folder / "text.txt", "--tasks", *TASKS, "--task-data", folder / "tasks", "--sequences", 6]
    words += ["--rates", 0.25, 0.5, "--max-fit-kl", 100.0, "--device", "cpu", "--out", tmp_path / "study.json"]
    command = ["zero-shot", *map(str, [folder / "model", *words])]
    assert main(command) == 0
    part = read_result(tmp_path / "study.json")
    (tmp_path / "study.json").unlink()
    for title in ("variance-50", "forward_kl-25"):
        (tmp_path / "study-pieces" / f"{title}.json").unlink()
    capsys.readouterr()
    assert main([*command, "--max-fit-kl", "99"]) == 2
    assert "other settings" in capsys.readouterr().err
    assert main(command) == 0
    assert capsys.readouterr().err.count("sst2, arc_easy") == 2
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    whole = read_result(tmp_path / "study.json")
    assert (whole["overlap"], whole["provenance"]) == (record["overlap"], part["provenance"])
    for one, direct in zip(whole["arms"], to_json(record)["arms"], strict=True):
        assert one["tasks"] == direct["tasks"]
        assert one["heads"] == direct["heads"]


def test_questions_longer_than_the_calibration_are_refused_or_cut(folder):
    with pytest.raises(InputError, match="at most 16 tokens"):
        study(folder, length=16)
    more = {"rates": (0.9,), "scores": ("variance",), "questions": 2, "max_fit_kl": 0.01}
    found = study(folder, length=16, too_long="cut", **more)
    (arm,) = found["arms"]
    assert (arm["name"], arm["share"]) == ("variance 33.3% (90% asked for)", 8 / 24)
    assert found["ordinary"]["tasks"]["sst2"]["shortened"] == 2


def test_controls_have_the_heads_of_their_arm_and_all_are_measured_again_after_healing(folder):
    more = {"scores": ("joint_cost",), "rates": (0.25,), "controls": True, "heal": 2 * LENGTH, "windows": 2}
    found = study(folder, other=folder / "text.txt", choosing=4, tasks=(), **more)
    frozen, pruned, linear = found["arms"]
    assert [arm["score"] for arm in found["arms"]] == ["joint_cost", "joint_cost pruned", "joint_cost in linear time"]
    assert frozen["heads"] == pruned["heads"] == linear["heads"]
    ordinary = found["ordinary"]
    assert ordinary["healed"]["texts"]["other"]["perplexity"] != ordinary["texts"]["other"]["perplexity"]
    for state, other in ((pruned, ordinary), (pruned["healed"], ordinary["healed"])):
        ratio = state["texts"]["other"]["perplexity"] / other["texts"]["other"]["perplexity"]
        assert state["texts"]["other"]["change"]["delta_ppl_percent"] == pytest.approx(100 * (ratio - 1))
    assert ZeroShot.tables(to_json(found))


def test_rates_are_shares_of_the_heads_that_can_be_frozen(folder, tmp_path):
    model = make("gemma3", vocab_size=300, max_position_embeddings=LENGTH)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes((folder / "model" / "tokenizer.json").read_bytes())
    eligible = len(measurable_heads(adapter_for(model)))
    assert 0 < eligible < sum(site.layout.num_heads for site in adapter_for(model).sites())
    found = study(folder, model=tmp_path / "model", tasks=(), scores=("variance",), rates=(0.5,))
    (arm,) = found["arms"]
    assert (len(arm["heads"]), arm["share"], found["eligible"]) == (eligible // 2, 0.5, eligible)
