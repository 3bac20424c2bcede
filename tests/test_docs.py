"""Examples in docstrings run; `make check` runs those of documents."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(
    file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for file in (ROOT / "saf").rglob("*.py")
    if ">>>" in file.read_text()
)


@pytest.mark.parametrize("module", EXAMPLES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    if result.attempted == 0:
        pytest.skip("every example of this module is marked +SKIP")
