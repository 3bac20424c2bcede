import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_docs = load_tool("check_docs")
check_source = load_tool("check_source")
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for path in check_docs.documents()}
EXAMPLES = sorted(
    file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for file in (ROOT / "saf").rglob("*.py")
    if ">>>" in file.read_text()
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_names_and_length(name):
    assert check_docs.static_problems(DOCUMENTS[name]) == []


@pytest.mark.parametrize("name", [n for n, path in DOCUMENTS.items() if check_docs.script(path.read_text()).strip()])
def test_code_blocks_run(name):
    assert check_docs.run(DOCUMENTS[name]) is None


@pytest.mark.parametrize("module", EXAMPLES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    if result.attempted == 0:
        pytest.skip("every example of this module is marked +SKIP")


@pytest.fixture
def document(tmp_path, monkeypatch):
    """Write a README in an otherwise empty repository and return its path."""
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)

    def write(text: str) -> Path:
        (tmp_path / "README.md").write_text(text)
        return tmp_path / "README.md"

    return write


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[there](docs/gone.md)", "README.md:1: link to docs/gone.md: no such file"),
        ("# One\n\n[up](#two)", "README.md:3: link to #two: no such heading"),
        ("see `saf/gone.py`", "README.md:1: names `saf/gone.py`: no such file"),
        ("in /" + "home/me/x", "README.md:1: a path of one machine"),
        ("```python\nx = = 1\n```", "README.md:2: ```python does not parse: invalid syntax"),
        ("see `saf pretain`", "README.md:1: `saf pretain`: saf has no such command"),
        ("see `saf bench speed --out x`", "README.md:1: `saf bench speed --out x`: saf has no such command"),
        ("`--freeze.rates 1`", "README.md:1: `--freeze.rates 1`: there is no flag --freeze.rates"),
        (
            "```sh\nsaf data prepare x \\\n  --rate 1  # --no\n```",
            "README.md:3: `saf data prepare x --rate 1`: there is no flag --rate",
        ),
        ("line\n" * 150, "README.md:150: 150 lines; it must stay under 150"),
    ],
)
def test_a_wrong_document_is_told(document, text, problem):
    assert check_docs.static_problems(document(text)) == [problem]


def test_a_right_document_passes(document, tmp_path):
    (tmp_path / "saf").mkdir()
    text = "# Two words\n[a](#two-words) [b](https://x.org" + "/home/a) `saf/NAME.py` `pip install --x y` `runs/a`\n"
    text += "`saf COMMAND --help` `saf.load` `saf bench op` `--freeze.rate 1`\n```sh\nsaf bench op --model 124m\n```"
    assert check_docs.static_problems(document(text)) == []


def test_blocks_share_names_and_a_failure_has_the_line_of_the_document(document):
    good = "```python\nx = 1\n```\ntext\n- item\n  ```python\n  assert x == 1\n  ```\n```python no-run\n1/0\n```\n"
    assert check_docs.run(document(good)) is None
    failure = check_docs.run(document(good + "```python\nassert x == 2\n```\n"))
    assert 'README.md", line 13' in failure


@pytest.mark.parametrize(
    ("code", "path", "count"),
    [
        ("import torch.distributed as dist", "saf/train/loop.py", 1),
        ("import torch\ntorch.distributed.barrier()", "saf/train/loop.py", 1),
        ("import torch.distributed as dist", "saf/distributed.py", 0),
        ("import torch.distributed as dist", "saf/train/parallel.py", 0),
        ("from torch import load\nload('x')", "saf/sidecar.py", 1),
        ("from safetensors.torch import load_file", "saf/train/checkpoint.py", 1),
        ("import json\njson.load(file)\njson.loads(text)", "saf/cli/options.py", 1),
        ("isinstance(model, GPT)", "saf/models/adapter.py", 0),
        ("hasattr(backend, 'step')", "saf/ops/attention.py", 1),
        ("hasattr(optimizer, 'step')", "saf/surgery/optimizer.py", 0),
        ("isinstance(model, (int, models.GPT))\nisinstance(model, nn.Module | GPT)", "saf/surgery/apply.py", 2),
        ("isinstance(one, TrainablePattern)\nisinstance(one, Pattern)", "saf/patterns.py", 1),
        ("import numpy as np\nnp.random.seed(0)", "saf/data/windows.py", 1),
        ("import torch\n'torch.save'  # torch.load\ntorch.Generator().manual_seed(0)", "saf/data/windows.py", 0),
    ],
)
def test_source_rules(code, path, count):
    assert len(check_source.problems(code, path)) == count
