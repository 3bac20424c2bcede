"""Examples in docstrings run; the checkers of documents and source find what is wrong (`make check` runs them)."""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(
    file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for file in (ROOT / "saf").rglob("*.py")
    if ">>>" in file.read_text()
)


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", EXAMPLES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    if result.attempted == 0:
        pytest.skip("every example of this module is marked +SKIP")


def test_a_wrong_document_is_refused_line_by_line(tmp_path):
    check = load_tool("check_docs")
    check.ROOT = tmp_path
    wrong = ["[there](docs/gone.md)", "[up](#two)", "`saf/gone.py`", "in /" + "home/me/x", "`saf pretain`"]
    right = ["# One", "[one](#one)", "[b](https://x.org" + "/home/a)", "`pip install --x y`"]
    (tmp_path / "README.md").write_text("\n".join([*wrong, *right, "```python", "x = = 1", "```"]))
    found = check.static_problems(tmp_path / "README.md")
    assert [line.split(":")[1] for line in found] == ["1", "2", "3", "4", "5", "11"]


def test_blocks_share_names_and_a_failure_has_the_line_of_the_document(tmp_path):
    check = load_tool("check_docs")
    check.ROOT = tmp_path
    text = "```python\nx = 1\n```\n```python no-run\n1/0\n```\n- item\n  ```python\n  assert x == 2\n  ```\n"
    (tmp_path / "README.md").write_text(text)
    assert 'README.md", line 9' in check.run(tmp_path / "README.md")


def test_source_rules():
    check = load_tool("check_source")
    wrong = "import torch.distributed as dist\nimport torch, json\njson.load(file)\ntorch.save(x)\nisinstance(x, GPT)"
    found = check.problems(wrong, "saf/train/loop.py")
    assert [line.split(":")[1] for line in found] == ["1", "3", "4", "5"]
    right = "import json\nimport torch\njson.loads(text)\n'torch.save'  # torch.load\ntorch.Generator().manual_seed(0)"
    assert check.problems(right, "saf/train/loop.py") == []
