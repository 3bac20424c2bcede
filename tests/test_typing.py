"""Type checkers and editors find the package: it says that it is typed, and an editable install is a plain path."""

import json
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "saf" / "py.typed").is_file()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["saf"]
    assert settings["package-dir"] == {"": "."}


def test_an_editable_install_is_a_path_that_type_checkers_follow():
    installed = distribution("saf")
    if not json.loads(installed.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        pytest.skip("saf is not installed as editable here")
    links = [Path(str(file.locate())) for file in installed.files or () if file.suffix == ".pth"]
    assert links
    for link in links:
        assert all((Path(line) / "saf" / "__init__.py").is_file() for line in link.read_text().split())
