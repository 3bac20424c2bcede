"""The public names and commands: adding one is a decision, losing one breaks users."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import saf

ROOT = Path(__file__).parents[1]
NAMES = """
GPT AttentionStatistics CompactPattern DensePattern ExponentialPattern FreezeConfig FreezeReport FrozenHeads GPTConfig
Gradual HeadLayout HeadSet OneTime Prefill QKGradient SafError TrainLoss ValidationBudget calibrate dense_pattern
finalize_ fit fit_compact fit_exponential fit_kl freeze_ frozen_attention gate_gradients head_outputs
install_ load mixed_attention ops preset prune_ save score select storage_report uninstall_
"""
COMMANDS = "data pretrain finetune freeze evaluate compare report inspect bench doctor"


def test_the_public_names_are_these():
    assert saf.__all__ == NAMES.split()
    assert all(hasattr(saf, name) for name in saf.__all__)


def test_the_commands_are_these():
    shown = subprocess.run([sys.executable, "-m", "saf", "--help"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == COMMANDS.split()


def test_a_package_index_shows_the_readme_with_the_names_of_files_that_the_source_archive_has(tmp_path):
    (tmp_path / "tree").mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, tmp_path / "tree")
        elif path.name in ("saf", "docs", "examples"):
            shutil.copytree(path, tmp_path / "tree" / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path / "tree", check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        page = archive.extractfile(f"saf-{saf.__version__}/PKG-INFO").read().decode()
    linked = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()))
    assert linked <= names
    assert "](docs/" not in page
    assert {name for name in linked if not name.endswith(".svg")} <= set(re.findall(r"\(`([^`]+)`\)", page))


def test_type_checkers_find_the_package():
    assert (ROOT / "saf" / "py.typed").is_file()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["saf"]
