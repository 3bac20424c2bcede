"""`saf report`: one page about runs, a model, or benchmarks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from saf.cli.command import Command
from saf.cli.output import show
from saf.errors import InputError
from saf.records.files import naming_unsealed
from saf.records.paths import Kind, expect
from saf.report.benchmarks.page import read_records, write_bench_report
from saf.report.benchmarks.picture import write_bars
from saf.report.models.page import write_model_report
from saf.report.runs.page import write_report
from saf.report.runs.picture import write_picture


@dataclass(kw_only=True)
class Report(Command):
    """Write one self-contained HTML page about runs, a model with frozen heads, or files of `saf bench`."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders, the first ordinary one is what frozen ones are compared with; a folder of a model of transformers,
    perhaps with the evaluations of the model before and after; or .json files of `saf bench`."""
    out: Path | None = None
    """An .html file, or a folder for report.html; if not given, the last run's folder, or beside the last file."""
    picture: Path | None = None
    """Also write the head map and the curves, or the bars, as one .svg file."""
    json: bool = False
    """Print JSON instead of lines."""

    def run(self) -> dict[str, Any]:
        """Write the page and return where it is."""
        with naming_unsealed(list(self.runs)):
            return self._page()

    def _page(self) -> dict[str, Any]:
        """Write the page about runs or about benchmark files, and a picture where one is asked for."""
        if not self.runs:
            raise InputError("nothing to report on; name run folders or files of `saf bench`")
        if self.out and self.out.suffix in (".md", ".tex", ".csv", ".json", ".pdf", ".svg") and not self.out.is_dir():
            raise InputError(
                f"a page is HTML; expected --out to be an .html file or a folder, got {self.out.name} (--picture makes "
                "an .svg)"
            )
        first, *others = self.runs
        if expect(first, Kind.RUN, Kind.RESULT, Kind.TRANSFORMERS) is Kind.TRANSFORMERS:
            return self._model(first, others)
        files = [path for path in self.runs if expect(path, Kind.RUN, Kind.RESULT) is Kind.RESULT]
        if files and len(files) < len(self.runs):
            raise InputError("a page is about runs or about benchmarks; got folders and .json files together")
        if files:
            page = write_bench_report(files, self.out or files[-1].with_suffix(".html"))
        else:
            page = write_report(self.runs, self.out or self.runs[-1])
        drawn = None
        if self.picture:
            drawn = write_bars(read_records(files), self.picture) if files else write_picture(self.runs, self.picture)
        return self._written(page, drawn)

    def _model(self, folder: Path, evaluations: list[Path]) -> dict[str, Any]:
        """Write the page about a model of transformers, and what two evaluations tell of it."""
        if self.picture:
            raise InputError("--picture is of runs and benchmarks; a page about a model has none, leave it out")
        for path in evaluations:
            expect(path, Kind.EVALUATION)
        return self._written(write_model_report(folder, evaluations, self.out or folder))

    def _written(self, page: Path, drawn: Path | None = None) -> dict[str, Any]:
        """Show where a page and its picture are, and return it."""
        result: dict[str, Any] = {"report": str(page), "bytes": page.stat().st_size}
        lines = [f"{page}  ({result['bytes'] / 1e3:,.0f} kB; open it in a browser)"]
        if drawn is not None:
            result["picture"] = str(drawn)
            lines.append(result["picture"])
        show(result, *lines, as_json=self.json)
        return result


COMMAND = Report
