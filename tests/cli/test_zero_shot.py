"""`saf evaluate --tasks` and `saf compare` of its folders: a checkpoint of the project, a folder of transformers."""

import pytest
import tokenizers
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'saf[eval]'")

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import saf.integrations.transformers  # noqa: F401
from saf.data.tokenizer import train_bpe
from saf.heads import HeadSet
from saf.records.files import read_lines
from saf.records.table import signed
from saf.surgery import prune_
from tests.tasks.zero_shot_files import COUNT, expected, write_tasks
from tests.transformers_models import make

TASKS = ("sst2", "arc_easy", "boolq")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_checkpoints_are_measured_by_perplexity_and_tasks(arms, files, saf, saf_json, tmp_path):
    words = ("--tasks", *TASKS, "--task-data", files, "--limit", 2, "--too-long", "cut", "--device", "cpu")
    for name, run in zip(("ordinary", "frozen"), arms, strict=True):
        code, out, err = saf("evaluate", run, *words, "--out", tmp_path / name)
        assert (code, "it/s]" in err) == (0, False)  # lm-eval's own bars
        assert "longer than 32 tokens, cut" in " ".join(out.split())
    record = saf_json("compare", tmp_path / "ordinary", tmp_path / "frozen", "--out", tmp_path / "changes")
    assert "delta_ppl_percent" in record
    tasks = record["zero_shot"]["tasks"]
    assert list(tasks) == list(TASKS)
    for task in tasks.values():
        assert task["gained"] - task["lost"] == pytest.approx(COUNT * task["difference"])
        assert [sum(taken.values()) for taken in task["taken"]] == [task["questions"]] * 2 == [COUNT, COUNT]
    (tmp_path / "frozen" / "zero_shot.json").unlink()
    code, out, err = saf("compare", tmp_path / "ordinary", tmp_path / "frozen")
    assert (code, "zero_shot.json is in" in err, "Zero-shot" in out) == (0, True, False)


def test_a_model_of_transformers_needs_no_data(files, saf, saf_json, tmp_path):
    text = "Question: is this a red film? Answer: no, a green dog. " * 20
    model = make("llama-grouped", vocab_size=300, max_position_embeddings=96)
    model.save_pretrained(tmp_path / "model")
    train_bpe([text], vocab_size=300).save(tmp_path / "model")
    words = ("--tasks", *TASKS, "--task-data", files, "--questions", 4, "--batch-size", 3)
    first = saf_json("evaluate", tmp_path / "model", *words, "--out", tmp_path / "a")
    assert "perplexity" not in first
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
    saf_json("report", tmp_path / "pruned", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html")
    assert (
        f"Mean change {signed(100 * record['mean_difference'], 2, '')} points" in (tmp_path / "page.html").read_text()
    )
    pruned = ("evaluate", tmp_path / "pruned", *words)
    for command, message in (
        (("compare", tmp_path / "short", tmp_path / "longer"), "differ in longest: 12 in"),
        ((*pruned, "--length", 12), "at most 12 tokens"),
        ((*pruned, "--length", 97), "more than the model takes, 96"),
        (("evaluate", tmp_path / "pruned", "--too-long", "cut"), "has no effect without --tasks"),
        (("evaluate", tmp_path / "pruned", "--tasks", "sst2", "--task-data", tmp_path), "holds no dev.tsv"),
    ):
        code, _, err = saf(*command)
        assert (code, message in " ".join(err.split())) == (2, True), err


def test_tokens_that_a_tokenizer_adds_at_the_end_are_no_part_of_a_choice(files, saf_json, tmp_path):
    """Each choice is one token behind its context; the oracle is the model in float64, one sequence at a time."""
    train_bpe([" negative positive" * 9], vocab_size=300).save(tmp_path)
    package = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    package.add_special_tokens(["<s>", "</s>"])
    own = [(name, package.token_to_id(name)) for name in ("<s>", "</s>")]
    package.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=own)
    sizes = {"vocab_size": package.get_vocab_size(), "max_position_embeddings": 128}
    make("llama-grouped", **sizes).save_pretrained(tmp_path / "model")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=package, **special).save_pretrained(tmp_path / "model")
    words = ("--tasks", "sst2", "--task-data", files, "--device", "cpu", "--precision", "fp32")
    saf_json("evaluate", tmp_path / "model", *words, "--out", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64).eval()
    for n, answer in enumerate(read_lines(tmp_path / "out" / "zero_shot.jsonl")[:COUNT]):
        context, choices, _ = expected("sst2", n)
        ids = [package.token_to_id("<s>"), *package.encode(context, add_special_tokens=False).ids]
        spelled = [package.encode(f" {choice}", add_special_tokens=False).ids for choice in choices]
        assert [len(tokens) for tokens in spelled] == [1, 1]
        with torch.no_grad():
            row = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert answer["log_probs"] == pytest.approx([float(row[token]) for (token,) in spelled], abs=1e-4)
        assert abs(answer["log_probs"][0] - answer["log_probs"][1]) > 1e-3
