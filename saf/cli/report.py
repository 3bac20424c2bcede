"""`saf report` writes a self-contained page about runs, or about a Hugging Face model with frozen heads."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.output import show
from saf.cli.parsing import parse
from saf.errors import InputError
from saf.records.run import is_transformers_model
from saf.report.page import write_report


@dataclass(kw_only=True)
class Command:
    """Write one self-contained HTML page about runs, or about a Hugging Face model with frozen heads.

    Runs, the ordinary one first; or a model and its evaluations before and after:

      $ saf report runs/ordinary runs/frozen
      $ saf report FROZEN before after
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER [FOLDER ...]")]
    """Show these run folders; the first ordinary one is the baseline. Or show a Hugging Face folder, with its
    evaluations before and after (`saf evaluate --out`)."""
    out: Path | None = None
    """Write this .html file, or report.html into this folder; by default into the last run's, or the model's."""
    json: bool = False
    """Print JSON instead of lines."""

    def run(self) -> dict[str, Any]:
        if not self.runs:
            raise InputError("name run folders, or a folder of a Hugging Face model")
        if self.out and self.out.suffix not in ("", ".html") and not self.out.is_dir():
            raise InputError(f"--out must be an .html file or a folder, got {self.out.name}")
        # A model stands before its evaluations, the run that was trained last behind the others.
        default_folder = self.runs[0] if is_transformers_model(self.runs[0]) else self.runs[-1]
        page = write_report(self.runs, self.out or default_folder)
        result: dict[str, Any] = {"report": str(page), "bytes": page.stat().st_size}
        show(result, f"{page}  ({result['bytes'] / 1e3:,.0f} kB; open it in a browser)", as_json=self.json)
        return result


parse_words = partial(parse, Command, prog="saf report")
