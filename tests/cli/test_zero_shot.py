"""`saf evaluate --tasks` and `saf compare` of what it wrote: a checkpoint of the project, a folder of transformers."""

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'saf[eval]'")

import saf.integrations.transformers  # noqa: F401
from saf.data.tokenizer import train_bpe
from saf.heads import HeadSet
from saf.records.table import signed
from saf.surgery import prune_
from tests.tasks.zero_shot_files import COUNT, write_tasks
from tests.transformers_models import make

TASKS = ("sst2", "arc_easy", "boolq")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_checkpoints_are_judged_by_perplexity_and_tasks(arms, files, saf, saf_json, tmp_path):
    words = ("--tasks", *TASKS, "--task-data", files, "--limit", 2, "--too-long", "cut", "--device", "cpu")
    for name, run in zip(("ordinary", "frozen"), arms, strict=True):
        code, out, told = saf("evaluate", run, *words, "--out", tmp_path / name)
        assert (code, "it/s]" in told) == (0, False)  # lm-eval's own bars
        assert "longer than 32 tokens, cut" in " ".join(out.split())
    record = saf_json("compare", tmp_path / "ordinary", tmp_path / "frozen", "--out", tmp_path / "changes")
    assert "delta_ppl_percent" in record
    tasks = record["zero_shot"]["tasks"]
    assert list(tasks) == list(TASKS)
    for task in tasks.values():
        assert task["questions"] == COUNT
        assert task["gained"] - task["lost"] == pytest.approx(COUNT * task["difference"])
        assert [sum(taken.values()) for taken in task["taken"]] == [COUNT, COUNT]
    (tmp_path / "frozen" / "zero_shot.json").unlink()
    code, out, told = saf("compare", tmp_path / "ordinary", tmp_path / "frozen")
    assert (code, "zero_shot.json is in" in told, "Zero-shot" in out) == (0, True, False)


def test_a_model_of_transformers_needs_no_data(files, saf, saf_json, tmp_path):
    text = "Question: is this a red film? Answer: no, a green dog. " * 20
    model = make("llama-grouped", vocab_size=300, max_position_embeddings=96)
    model.save_pretrained(tmp_path / "model")
    train_bpe([text], vocab_size=300).save(tmp_path / "model" / "tokenizer.json")
    words = ("--tasks", *TASKS, "--task-data", files, "--questions", 4, "--batch-size", 3)
    code, _, told = saf("evaluate", tmp_path / "model", *words, "--partition", "train")
    assert (code, "--partition has no effect without --data" in told) == (2, True)
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
    assert "differ in longest: 12 in" in saf("compare", tmp_path / "short", tmp_path / "longer")[2]
    for length, message in ((12, "at most 12 tokens"), (97, "more than the model takes, 96")):
        assert message in " ".join(saf("evaluate", tmp_path / "pruned", *words, "--length", length)[2].split())
    hashes = record["provenance"]["checkpoints"]
    assert hashes["ordinary"] != hashes["frozen"]
    saf_json("report", tmp_path / "pruned", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"Mean change {signed(100 * record['mean_difference'], 2, '')} points" in page
    assert saf("report", tmp_path / "pruned", tmp_path / "b", tmp_path / "a")[0] == 2


def test_flags_without_an_effect_are_refused(arms, files, saf, tmp_path):
    for flags, message in (
        (("--too-long", "cut"), "has no effect without --tasks"),
        (("--tasks", "sst2", "sst2", "--limit", 1), "must be named once"),
        (("--tasks", "sst2", "--task-data", tmp_path, "--limit", 1), "holds no dev.tsv"),
    ):
        code, _, told = saf("evaluate", arms[0], *flags)
        assert (code, message in " ".join(told.split())) == (2, True)
