"""Rules about names and calls that ruff and import-linter cannot express: `python tools/check_source.py`.

Read from the syntax tree, so comments and strings do not count. Which room may import which is import-linter's.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_ONE_READER = "files are read by saf.records.files, whose errors name the file and say what to do"
# Dotted name (and everything below it) -> the files and folders where it may appear, and why it may not elsewhere.
NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "torch.distributed": (
        ("saf/distributed.py", "saf/checkpoint.py", "saf/train/step.py"),
        "several processes have three doors: saf/distributed.py, saf/checkpoint.py for files, and "
        "saf/train/step.py for updates",
    ),
    "pickle": ((), "files are safetensors and JSON"),
    "torch.load": ((), "files are safetensors and JSON"),
    "torch.save": ((), "files are safetensors and JSON"),
    "torch.manual_seed": ((), "take a torch.Generator as an argument; global generators belong to the caller"),
    "torch.cuda.manual_seed": ((), "take a torch.Generator as an argument; global generators belong to the caller"),
    "torch.cuda.manual_seed_all": ((), "take a torch.Generator as an argument; global generators belong to the caller"),
    "numpy.random.seed": ((), "take a numpy Generator as an argument; global generators belong to the caller"),
    "random.seed": ((), "take a random.Random as an argument; global generators belong to the caller"),
    "safetensors.safe_open": (("saf/records/files.py",), _ONE_READER),
    "safetensors.torch.load_file": (("saf/records/files.py",), _ONE_READER),
    "json.load": ((), _ONE_READER),
}

# A class -> the folders where `isinstance` may test for it, and why not elsewhere.
CLASSES: dict[str, tuple[tuple[str, ...], str]] = {
    "GPT": (("saf/models/",), "other code reads a model through its adapter"),
    **dict.fromkeys(
        ("CompactPattern", "DensePattern", "TrainablePattern"),
        ((), "every kind of pattern answers by the protocol in saf/patterns.py"),
    ),
}

# A built-in function -> the folders where it is not called, and why.
CALLS: dict[str, tuple[tuple[str, ...], str]] = {"hasattr": (("saf/ops/",), "a backend declares what it can do")}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield `(line, dotted name)` for every import and attribute access, aliases of imports resolved."""
    aliases: dict[str, str] = {}
    # First all imports, wherever they stand: attributes are resolved by them below.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                # `import a.b` binds the name a to the package a, `import a.b as c` binds c to a.b.
                top = item.name.partition(".")[0]
                aliases[item.asname or top] = item.name if item.asname else top
                yield node.lineno, item.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
                yield node.lineno, f"{node.module}.{item.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in aliases:
                yield node.lineno, f"{aliases[first]}.{rest}"


def problems(source: str, path: str) -> list[str]:
    """Return one line for each broken rule in the text of one file; `path` is relative to the repository."""
    tree, broken = ast.parse(source, path), set()  # a set, as `a.b` and `a.b.c` both break a rule of `a.b`
    for line, name in imports(tree):
        for rule, (allowed, reason) in NAMES.items():
            if (name == rule or name.startswith(f"{rule}.")) and not path.startswith(allowed):
                broken.add((line, f"{path}:{line}: {rule} is not used here: {reason}"))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        refused, reason = CALLS.get(node.func.id, ((), ""))
        if path.startswith(refused):
            broken.add((node.lineno, f"{path}:{node.lineno}: {node.func.id} is not called here: {reason}"))
        if node.func.id == "isinstance":
            for part in ast.walk(node.args[1]):  # of a class, a tuple or a union
                name = ast.unparse(part).rpartition(".")[2] if isinstance(part, ast.Name | ast.Attribute) else ""
                allowed, reason = CLASSES.get(name, ((path,), ""))
                if not path.startswith(allowed):
                    where = f"{path}:{node.lineno}"
                    broken.add((node.lineno, f"{where}: isinstance of {name} is not tested here: {reason}"))
    return [message for _, message in sorted(broken)]


def main() -> int:
    """Check every file of the package; print what is wrong and return the exit status."""
    files = sorted(path for folder in ("saf", "experiments") for path in (ROOT / folder).rglob("*.py"))
    broken = [line for file in files for line in problems(file.read_text(), file.relative_to(ROOT).as_posix())]
    print("\n".join(broken) or f"source rules: {len(files)} files, nothing to mend")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
