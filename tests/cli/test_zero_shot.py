"""`saf evaluate --tasks` and `saf compare` of what it wrote: a checkpoint of the project, a folder of transformers."""

import sys

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'saf[eval]'")

import saf.hf as saf_hf
import saf.integrations.transformers  # noqa: F401
from saf.data.tokenizer import train_bpe
from saf.heads import HeadSet
from saf.records.table import signed
from saf.surgery import prune_
from tests.transformers_models import make
from tests.zero_shot_files import COUNT, write_tasks

TASKS = ("sst2", "arc_easy", "boolq")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_checkpoints_are_judged_by_perplexity_and_tasks(arms, files, saf, saf_json, tmp_path):
    words = ("--tasks", *TASKS, "--task-data", files, "--limit", 2, "--too-long", "cut", "--device", "cpu")
    for name, run in zip(("ordinary", "frozen"), arms, strict=True):
        code, out, told = saf("evaluate", run, *words, "--out", tmp_path / name)
        assert code == 0
        assert [f"answering {task} {2 * COUNT}/{2 * COUNT} requests" in told for task in TASKS] == [True, False, True]
        assert "s left" in told
        assert "it/s]" not in told  # lm-eval's own bars
        assert out.index("perplexity") < out.index("Zero-shot tasks")
        assert "longer than 32 tokens, cut" in " ".join(out.split())
    record = saf_json("compare", tmp_path / "ordinary", tmp_path / "frozen", "--out", tmp_path / "changes")
    assert "delta_ppl_percent" in record
    tasks = record["zero_shot"]["tasks"]
    assert list(tasks) == list(TASKS)
    for task in tasks.values():
        assert task["questions"] == COUNT
        assert task["gained"] - task["lost"] == pytest.approx(COUNT * task["difference"])
        assert [sum(taken.values()) for taken in task["taken"]] == [COUNT, COUNT]
    code, out, _ = saf("compare", tmp_path / "ordinary", tmp_path / "frozen")
    assert code == 0
    assert "Holm's correction" in " ".join(out.split())
    (tmp_path / "frozen" / "zero_shot.json").unlink()
    code, out, told = saf("compare", tmp_path / "ordinary", tmp_path / "frozen")
    assert code == 0
    assert "zero_shot.json is in" in told
    assert "Holm" not in out


def test_a_model_of_transformers_needs_no_data(files, saf, saf_json, tmp_path):
    text = "Question: is this a red film? Answer: no, a green dog. " * 20
    model = make("llama-grouped", vocab_size=300, max_position_embeddings=96)
    model.save_pretrained(tmp_path / "model")
    train_bpe([text], vocab_size=300).save(tmp_path / "model" / "tokenizer.json")
    words = ("--tasks", *TASKS, "--task-data", files, "--questions", 4, "--batch-size", 3)
    for flag in (("--bos",), ("--partition", "train"), ("--limit", 1)):
        code, _, told = saf("evaluate", tmp_path / "model", *words, *flag)
        assert code == 2
        assert f"{flag[0]} has no effect on tasks" in told
    first = saf_json("evaluate", tmp_path / "model", *words, "--out", tmp_path / "a")
    assert "perplexity" not in first
    assert first["zero_shot"]["tasks"]["sst2"]["questions"] == 4
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["zero_shot.json", "zero_shot.jsonl"]
    prune_(model, HeadSet([(0, 0), (0, 1)]))
    model.save_pretrained(tmp_path / "pruned")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "pruned" / "tokenizer.json")
    second = saf_json("evaluate", tmp_path / "pruned", *words, "--out", tmp_path / "b")
    record = saf_json("compare", tmp_path / "a", tmp_path / "b")
    for name, task in record["tasks"].items():
        shares = [one["zero_shot"]["tasks"][name]["accuracy"] for one in (first, second)]
        assert task["accuracy"] == shares
        assert task["difference"] == pytest.approx(shares[1] - shares[0])
    for name, length in (("short", 12), ("longer", 14)):
        cut = ("--too-long", "cut", "--length", length, "--out", tmp_path / name)
        assert saf_json("evaluate", tmp_path / "pruned", *words, *cut)["zero_shot"]["longest"] == length
    told = saf("compare", tmp_path / "short", tmp_path / "longer")[2]
    assert "differ in longest: 12 in" in told
    told = saf("evaluate", tmp_path / "pruned", *words, "--length", 12)[2]
    assert "at most 12 tokens" in " ".join(told.split())
    told = saf("evaluate", tmp_path / "pruned", *words, "--length", 97)[2]
    assert "--length 97 is more than the model takes, 96" in told
    hashes = record["provenance"]["checkpoints"]
    assert hashes["ordinary"] != hashes["frozen"]
    saf_json("report", tmp_path / "pruned", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"Mean change {signed(100 * record['mean_difference'], 2, '')} points" in page
    code, _, told = saf("report", tmp_path / "pruned", tmp_path / "b", tmp_path / "a")
    assert code == 2
    (tmp_path / "pruned" / "tokenizer.json").unlink()
    code, _, told = saf("evaluate", tmp_path / "pruned", *words)
    assert code == 2
    assert "tokenizer" in told


def test_flags_without_an_effect_are_refused(arms, files, saf, tmp_path):
    for flag in (("--task-data", files), ("--questions", 3), ("--too-long", "cut")):
        code, _, told = saf("evaluate", arms[0], *flag)
        assert code == 2
        assert "has no effect without --tasks" in told
    code, _, told = saf("evaluate", arms[0], "--tasks", "sst2", "sst2", "--limit", 1)
    assert code == 2
    assert "must be named once" in " ".join(told.split())
    code, _, told = saf("evaluate", arms[0], "--tasks", "sst2", "--task-data", tmp_path, "--limit", 1)
    assert code == 2
    assert "holds no dev.tsv" in told


def test_a_missing_package_is_named_with_its_extra(arms, files, saf, monkeypatch):
    monkeypatch.delitem(sys.modules, "saf.hf.lm_eval", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delattr(saf_hf, "lm_eval", raising=False)
    code, _, told = saf("evaluate", arms[0], "--tasks", "sst2", "--task-data", files, "--limit", 1)
    assert code == 2
    assert "pip install 'saf[eval]'" in told
