"""Which code a result is of: the commit of its checkout, marked where what decides it was edited."""

import subprocess

import pytest

import saf
from saf.records.provenance import commit


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of a package, a recipe and a document, which the package seems to run from."""
    for name in ("saf/__init__.py", "experiments/recipes/timing.py", "docs/log.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("# first\n")
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(saf, "__file__", str(tmp_path / "saf" / "__init__.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "marked"),
    [
        ("docs/log.md", False),
        ("saf/__init__.py", True),
        ("experiments/recipes/new.py", True),
    ],
)
def test_a_commit_is_marked_where_the_package_or_its_recipes_were_edited(checkout, edited, marked):
    (checkout / edited).write_text("# second\n")
    found = commit.__wrapped__() or ""
    assert len(found.removesuffix("+")) == 40
    assert found.endswith("+") == marked
