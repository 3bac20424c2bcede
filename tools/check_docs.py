"""Check the documents: lengths, links, named files, commands, flags, tables of results, and run their Python code.

    python tools/check_docs.py            # everything
    python tools/check_docs.py --no-run   # without running code

Blocks marked ```python run in order, one script a document, in an empty folder; blocks that need a GPU or a
network are marked ```python no-run and must only parse. Commands of `saf`, `make` and the experiments, in ```sh blocks
and in backticks, must exist with every flag that they name; the history may name what is gone.
"""

import argparse
import ast
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
HISTORY = ("CHANGELOG.md", "docs/log.md")
MAX_LINES = {"README.md": 150, "CONTRIBUTING.md": 120}
# A name in backticks is a file of the repository when it begins with one of these folders.
FOLDERS = ("saf", "docs", "tests", "tools", "examples", "experiments", "benchmarks", "results", ".ci")
MACHINE_FOLDERS = ("work", "tmp", "root", "home")
RUN_SECONDS = 240

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
CODE = re.compile(r"`([^`\n]+)`")
MACHINE_PATH = re.compile(rf"(?<![\w.:/-])/(?:{'|'.join(MACHINE_FOLDERS)})/")
FLAG = re.compile(r"--[a-z][\w.-]*")
# What `saf` answers without a command, and each command without a setting.
COMMON_FLAGS = {"--help", "--version"}
# A word that stands for another one: NAME, <name>, {name}, *.json, ...
PLACEHOLDER = re.compile(r"[A-Z]{2,}|[<>{}*…]|\.\.\.")


def documents() -> list[Path]:
    """Return the documents that exist, in a fixed order."""
    return sorted(path for pattern in DOCUMENTS for path in ROOT.glob(pattern))


def blocks(text: str) -> Iterator[tuple[int, int, str, int]]:
    """Yield `(first line, last line, info string, indent)` of each fenced block, fences included, from 0."""
    start, opening = 0, None
    for number, line in enumerate(text.splitlines()):
        fence = FENCE.match(line)
        if fence and opening is None:
            start, opening = number, fence
        # Closed by as many ticks: a block that shows a block has more.
        elif fence and opening and fence["ticks"] == opening["ticks"] and not fence["info"].strip():
            yield start, number, opening["info"].strip(), len(opening["indent"])
            opening = None


def prose(text: str) -> list[str]:
    """Return the lines of the document with fenced blocks left empty."""
    lines = text.splitlines()
    for first, last, _, _ in blocks(text):
        lines[first : last + 1] = [""] * (last + 1 - first)
    return lines


def script(text: str, *, info: str = "python") -> str:
    """Return the code of all blocks with this info string as one script, each at its own line number."""
    lines = text.splitlines()
    code = [""] * len(lines)
    for first, last, at, indent in blocks(text):
        if at == info:
            code[first + 1 : last] = [line.removeprefix(" " * indent) for line in lines[first + 1 : last]]
    return "\n".join(code)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    headings = [line.lstrip("#").strip() for line in prose(text) if re.match(r"#{1,6} ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _link_problem(path: Path, target: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists():
        return f"link to {target}: no such file"
    lost = anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())
    return f"link to {target}: no such heading" if lost else None


def _name_problem(name: str) -> str | None:
    """Return what is wrong with a name in backticks that looks like a file of the repository."""
    if "/" not in name or " " in name or name.split("/")[0] not in FOLDERS:
        return None
    known = list(takewhile(lambda part: not PLACEHOLDER.search(part), name.split("/")))
    return None if (ROOT / "/".join(known)).exists() else f"names `{name}`: no such file"


def commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield `(line, text)` of every command in ```sh blocks, whole over continued lines, and of code in backticks."""
    for first, last, info, _ in blocks(text):
        line = ""
        for number, part in enumerate(text.splitlines()[first + 1 : last] if info == "sh" else (), first + 2):
            line += part.partition(" #")[0].strip()
            if line.endswith("\\"):
                line = line[:-1]
            else:
                yield number, line
                line = ""
    for number, line in enumerate(prose(text), 1):
        yield from ((number, code.strip()) for code in CODE.findall(line))


def command_problem(command: str) -> str | None:
    """Return what is wrong with a command of `saf` or `make`, or with a flag that stands alone; None for any other."""
    from saf.cli import COMMANDS

    words = [word for word in command.split() if not PLACEHOLDER.search(word)]
    if words[:1] == ["make"]:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        used = [word for word in words[1:] if "=" not in word]
        return next((f"`{command}`: make has no target {word}" for word in used if word not in targets), None)
    if words[:1] == ["saf"]:
        names = [word for word in words[1:2] if not word.startswith("-")]  # the command, or none: `saf --help`
        if not {*names} <= COMMANDS.keys():
            return f"`{command}`: saf has no such command"
        known = flags_of(*names)
    elif words[:3] == ["python", "-m", "experiments"]:
        known = flags_of_experiments()
    elif words and FLAG.match(words[0]):  # a flag alone, whose command the sentence around it names
        known = flags_of_experiments().union(*map(flags_of, COMMANDS))
    else:
        return None
    used = [word.split("=")[0].rstrip(",") for word in words if FLAG.match(word)]
    return next((f"`{command}`: there is no flag {flag}" for flag in used if flag not in known), None)


@cache
def flags_of(name: str = "") -> set[str]:
    """Return the flags of a command, of all its kinds; without a name those of `saf` itself."""
    from saf.cli import main as saf

    def help_of(*words: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            saf([*words, "--help-all"])
        return shown.getvalue()

    text = help_of(name) if name else ""
    # `saf bench` lists its benchmarks with a dot, and each of them has flags of its own.
    kinds = [help_of(name, kind) for kind in re.findall(r"• ([\w:-]+)", text)]
    return COMMON_FLAGS.union(*map(FLAG.findall, [text, *kinds]))


@cache
def flags_of_experiments() -> set[str]:
    """Return the flags of `python -m experiments` and its further commands."""
    from experiments.__main__ import Experiments, Keep, Results

    named = {each.name for command in (Experiments, Keep, Results) for each in fields(command)}
    return COMMON_FLAGS | {f"--{name.replace('_', '-')}" for name in named}


def static_problems(path: Path) -> list[str]:
    """Return what is wrong with one document without running it."""
    text = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    problems: list[tuple[int, str]] = []
    limit = MAX_LINES.get(name)
    if limit and len(text.splitlines()) >= limit:
        problems.append((limit, f"{len(text.splitlines())} lines; it must stay under {limit}"))
    for number, line in enumerate(prose(text), 1):
        checks = [_link_problem(path, link["target"]) for link in LINK.finditer(line)]
        checks += [_name_problem(code) for code in CODE.findall(line) if name not in HISTORY]
        problems += [(number, problem) for problem in checks if problem]
    if name not in HISTORY:
        problems += [(line, problem) for line, code in commands(text) if (problem := command_problem(code))]
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            problems.append((number, "a path of one machine"))
    for info in ("python", "python no-run"):
        try:
            ast.parse(script(text, info=info))
        except SyntaxError as error:
            problems.append((error.lineno or 0, f"```{info} does not parse: {error.msg}"))
    return [f"{name}:{number}: {problem}" for number, problem in sorted(problems)]


def run(path: Path) -> str | None:
    """Run the Python blocks of one document in an empty folder; return the end of the output if they fail."""
    code = script(path.read_text())
    if not code.strip():
        return None
    with tempfile.TemporaryDirectory() as folder:
        # Under the document's own name and line numbers, so that a traceback points into the document.
        (Path(folder) / path.name).write_text(code)
        try:
            done = subprocess.run(
                [sys.executable, path.name], cwd=folder, capture_output=True, text=True, timeout=RUN_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"{path.relative_to(ROOT)}: still running after {RUN_SECONDS} s"
    return f"{path.relative_to(ROOT)}:\n{(done.stdout + done.stderr)[-4000:]}" if done.returncode else None


def main() -> int:
    """Check every document; print what is wrong and return the exit status."""
    parser = argparse.ArgumentParser(description="Check README.md, CONTRIBUTING.md, CHANGELOG.md and docs/.")
    parser.add_argument("--no-run", action="store_true", help="do not run the Python blocks")
    arguments = parser.parse_args()
    problems = [problem for path in documents() for problem in static_problems(path)]
    if (ROOT / "results").is_dir():  # rendered pages are what `python -m experiments results` makes of it
        from experiments.results import stale

        problems += [problem.replace(f"{ROOT}/", "") for problem in stale(ROOT / "results", ROOT / "docs")]
    if not arguments.no_run:
        problems += [failure for path in documents() if (failure := run(path))]
    print("\n".join(problems) or f"documents: {len(documents())} files, nothing to mend")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
