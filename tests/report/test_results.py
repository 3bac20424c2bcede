"""The document of all results says what the files say, beside the paper."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from experiments.results import write_document
from saf.bench import Prefill
from saf.bench.protocol import Point
from saf.errors import InputError
from saf.report.results import render_results
from tests.report.benchmark_records import TIMES, record
from tests.report.synthetic import Shape, edit, write_pair

ROOT = Path(__file__).resolve().parents[2]


def put(folder: Path, name: str, content: dict) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return every table of a document, a mapping of its head for each row."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.strip().split("\n")
        ]
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def test_a_section_has_the_points_of_all_its_files_with_device_versions_commands_and_links(tmp_path):
    measured, longer = record(), record(points=[Point(16384, 2, 4)])
    memory = record(memory={0.0: 2**34, 0.25: 15 * 2**30}) | {"rows": []}
    put(tmp_path / "results", "bench/update-16k.json", longer)
    put(tmp_path / "results", "bench/update-4k.json", measured)
    put(tmp_path / "results", "bench/memory.json", memory)
    made = render_results(tmp_path / "results", tmp_path / "docs")
    text = made["results.md"]
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert headings == ["Results", "Summary", "Updates: speed", "Updates: peak memory"]
    assert text.count("<details><summary>2 files: conditions and commands</summary>") == 1
    assert text.count("</details>") == 2
    provenance = measured["provenance"]
    assert text.count(f"Invented 9000, saf {provenance['versions']['saf']}") == 2
    summary, speeds, files, memory, *_ = tables(text)
    assert [row["file"] for row in files] == [
        f"[{name}](../results/bench/{name}.json)" for name in ("update-4k", "update-16k")
    ]
    assert {(row["source"], row["command"]) for row in files} == {
        (provenance["source_hash"][:12], f"`{provenance['command']}`")
    }
    assert [row["what"] for row in summary] == ["update speedup: 124m"] * 2 + ["peak memory of update: 124m"]
    assert [row["paper, 25%"] for row in summary] == ["1.056×", "1.025×", "−1.96%"]
    assert summary[2]["25% frozen"] == "−6.25%"
    assert [row["point"] for row in speeds] == ["4096x8x4"] * 2 + ["16384x2x4"] * 2
    assert [row["in"] for row in speeds[1:3]] == [row["file"] for row in files]
    assert [row["paper"] for row in speeds] == ["1.056×", "1.119×", "1.025×", "1.070×"]
    assert {row["control"] for row in speeds} == {f"{measured['rows'][0]['control_ratio']:.4f}"}
    assert [row["against ordinary"] for row in memory] == ["–", "−6.25%"]
    assert "ordinary attention on cuDNN in every head, not compiled" in text
    assert "- Paper, tab:main-results: 124M, GH200, bfloat16, ordinary heads on flash attention" in text


def test_peak_memory_of_prompts_stands_apart_from_that_of_updates(tmp_path):
    """Each by its own kind, which knows what the paper has of it: of a prompt of 4096x8 it has no memory."""
    peaks, settings = {0.0: 2**34, 0.25: 15 * 2**30}, Prefill(pairs=4, device="cpu")
    prompts = record(settings=settings, points=[Point(4096, 8, precision="fp32")], memory=peaks)
    for name, made in (("update", record(memory=peaks)), ("prefill", prompts)):
        put(tmp_path, f"bench/{name}.json", made | {"rows": []})
    text = render_results(tmp_path, tmp_path)["results.md"]
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Summary", "Updates: peak memory", "Prefill: peak memory"]
    updates, prompts = (found for found in tables(text) if "peak memory" in found[0])
    assert updates[1]["paper"] == "−1.96%"
    assert "paper" not in prompts[1]


def test_what_several_processes_share_stands_beside_what_the_papers_gpus_shared(tmp_path):
    shared = record(points=[Point(8192, 2, 8)])
    for row in shared["rows"]:
        row["model"] = "1b"
    for processes in (1, 2):
        shared["provenance"]["processes"] = processes
        put(tmp_path, f"{processes}/bench/update.json", shared)
    alone, together = (
        [row["paper"] for row in tables(render_results(folder, folder)["results.md"])[1]]
        for folder in (tmp_path / "1", tmp_path / "2")
    )
    assert alone == ["1.066×", "1.165×"]
    assert together == ["1.0682 ± 0.0005×", "1.1667 ± 0.0003×"]


def test_refusals_left_out_arms_and_early_ends_are_told(tmp_path):
    times = {name: blocks for name, blocks in TIMES.items() if name != "25% free cudnn"} | {"control cudnn": [110.0]}
    put(tmp_path, "bench/update.json", record(times=times) | {"finished": False})
    text = render_results(tmp_path, tmp_path)["results.md"]
    assert [row["speedup"] for row in tables(text)[1]] == ["refused", "refused"]
    assert (tables(text)[0][0]["25% frozen"], tables(text)[0][0]["50% frozen"]) == ("refused", "refused")
    assert "- Refused: 124m, 4096x8x4: two ordinary models differ by 9.09%." in text
    lacking = "Left out: T=4096 B=8 x4: 25% free cudnn: RuntimeError: no way to run 25% free cudnn."
    assert f"Not finished: what was measured before the benchmark was stopped. {lacking}" in text
    assert "free bound" not in tables(text)[1][0]


def test_the_summary_has_the_newest_number_of_each_point(tmp_path):
    measured = record()
    older = measured | {"provenance": measured["provenance"] | {"date": "2026-01-01T00:00:00+00:00"}}
    rows = [row | {"ratio": row["ratio"] + 0.5} for row in measured["rows"]]
    put(tmp_path, "update-a.json", measured)
    put(tmp_path, "update-b.json", older | {"rows": rows})
    (row,) = tables(render_results(tmp_path, tmp_path)["results.md"])[0]
    assert row["in"] == "[update-a](update-a.json)"
    first = next(each for each in measured["rows"] if each["role"] not in ("control", "free"))
    assert row["25% frozen"] == f"{first['ratio']:.3f}×"


def test_the_summary_has_the_mean_over_orders_of_finetuning(tmp_path):
    measured = record(variants=("sst2 order-1", "sst2 order-2"))
    rows = [row | {"ratio": row["ratio"] + 0.5 * row["variant"].endswith("2")} for row in measured["rows"]]
    settings = measured["settings"] | {"task": "sst2"}
    put(tmp_path, "finetune.json", measured | {"kind": "finetune", "rows": rows, "settings": settings})
    summary, means, *_ = tables(render_results(tmp_path, tmp_path)["results.md"])
    low, high = (row["ratio"] for row in rows if row["rate"] == 0.25 and row["role"] == "frozen")
    assert [row["what"] for row in summary] == ["finetuning update speedup: 124m, sst2, mean of 2 orders"]
    assert summary[0]["25% frozen"] == f"{(low + high) / 2:.3f}×"
    assert means[0]["speedup, mean ± SE"] == f"{(low + high) / 2:.3f}× ± {(high - low) / 2:.3f}"


def test_the_summary_leaves_points_that_the_paper_has_no_number_of_to_the_sections(tmp_path):
    put(tmp_path, "update.json", record())
    longer = record()
    longer["rows"] = [row | {"point": row["point"] | {"length": 3000}} for row in longer["rows"]]
    put(tmp_path, "update-3000.json", longer)
    text = render_results(tmp_path, tmp_path)["results.md"]
    summary, speeds, *_ = tables(text)
    assert [row["in"] for row in summary] == ["[update](update.json)"]
    assert {row["point"] for row in speeds} == {"3000x8x4", "4096x8x4"}
    assert "- Points that the paper has no number of, 1 more, stand in the sections." in text


def test_numbers_follow_the_file(tmp_path):
    path = put(tmp_path, "bench/update.json", record())
    before = render_results(tmp_path, tmp_path)
    assert render_results(tmp_path, tmp_path) == before
    edit(path, rows=[row | {"ratio": row["ratio"] + 0.1} for row in json.loads(path.read_text())["rows"]])
    after = render_results(tmp_path, tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"results.md"}


def test_training_runs_stand_side_by_side(tmp_path):
    write_pair(tmp_path / "results" / "small", Shape(updates=60))
    for arm in ("ordinary", "frozen"):
        edit(tmp_path / "results" / "small" / arm / "config.json", settings={"model": "124m"}, train__length=4096)
    text = render_results(tmp_path / "results", tmp_path / "docs")["results.md"]
    (summary,), (ordinary, frozen) = tables(text)[:2]
    assert (summary["what"], summary["paper, 25%"]) == ("perplexity, matched tokens", "+0.768 ± 0.067%")
    assert frozen["change, 95% interval"].startswith(summary["25% frozen"])
    result = json.loads((tmp_path / "results/small/frozen/result.json").read_text())
    assert (ordinary["arm"], ordinary["heads frozen"], frozen["heads frozen"]) == ("ordinary", "0 of 12", "3 of 12")
    assert frozen["perplexity"] == f"{result['report_perplexity']:.3f}"
    assert re.fullmatch(r"\+\d\.\d\d% \(−\d\.\d\d% to \+\d\.\d\d%\)", frozen["change, 95% interval"])
    assert frozen["paper's change"] == "+0.768 ± 0.067%"
    assert frozen["freezing took"] == "1.39 s"
    assert frozen["paper's freezing"] == "54.86 ± 6.04 s"
    assert ordinary["paper's change"] == "–"
    assert "cpu, saf 0.1.0, torch 2.13.0; commit 0123abc" in text
    assert "saf pretrain --preset tiny" in text
    assert "40 paired windows" in text


def test_the_papers_changes_stand_beside_changes_alone(tmp_path):
    write_pair(tmp_path / "small", Shape(updates=60))
    for arm in ("ordinary", "frozen"):
        edit(tmp_path / "small" / arm / "config.json", settings={"model": "124m"}, train__length=4096)
    shutil.rmtree(tmp_path / "small" / "ordinary")
    text = render_results(tmp_path, tmp_path)["results.md"]
    (frozen,) = next(found for found in tables(text) if "arm" in found[0])
    assert frozen["paper's freezing"] == "54.86 ± 6.04 s"
    assert "paper's change" not in frozen


def test_runs_that_differ_in_more_than_the_freezing_say_so(tmp_path):
    _, frozen = write_pair(tmp_path / "small")
    edit(frozen / "config.json", train__seed=1)
    text = render_results(tmp_path, tmp_path)["results.md"]
    assert "- frozen differs in more than the freezing: train.seed: 1337" in text


def test_an_unknown_record_still_gets_its_tables(tmp_path):
    content = {
        "schema": "saf.result/2",
        "kind": "novelty",
        "settings": {},
        "provenance": {"device": "Invented 9000", "versions": {}, "command": "saf bench novelty", "commit": None},
        "answer": {"mean": 0.25, "all": [1, 2, 3, 4, 5]},
        "rows": [{"name": "a|b", "seconds": 1.5, "ok": True}, {"name": "c", "size": {"heads": 3}}],
        "left_out": [{"what": "d", "why": "out of time"}],
    }
    put(tmp_path, "novel.json", content)
    put(tmp_path, "loose.json", {"alone": 7})
    text = render_results(tmp_path, tmp_path)["results.md"]
    assert "## Novelty\n\n### novel" in text
    values, rows = tables(text)[:2]
    assert values == [{"": "answer: mean", "value": "0.25"}, {"": "answer: all", "value": "5 values"}]
    assert rows[0] == {"name": "a\\|b", "seconds": "1.5", "ok": "yes", "size: heads": "–"}
    assert rows[1]["size: heads"] == "3"
    assert "- Left out: d: out of time." in text
    assert "device and versions not recorded" in text.split("### loose")[1]


def test_a_folder_without_results_and_a_damaged_file_are_refused(tmp_path):
    with pytest.raises(InputError, match="is not a folder of results"):
        render_results(tmp_path / "none", tmp_path)
    with pytest.raises(InputError, match="holds no results"):
        render_results(tmp_path, tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match=r"broken\.json is not valid JSON"):
        render_results(tmp_path, tmp_path)


def check_docs():
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "tools" / "check_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_repository_is_up_to_date():
    assert check_docs().stale_results() == []


def test_a_stale_document_is_told(tmp_path, monkeypatch):
    tool = check_docs()
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tool.stale_results() == []
    path = put(tmp_path / "results", "bench/update.json", record())
    stale = tool.stale_results()
    assert [line.split(":")[0] for line in stale] == ["docs/results.md"]
    assert "python -m experiments results" in stale[0]
    write_document(tmp_path / "results", tmp_path / "docs" / "results.md")
    assert tool.stale_results() == []
    edit(path, seconds=1.0, finished=False)
    assert [line.split(":")[0] for line in tool.stale_results()] == ["docs/results.md"]
