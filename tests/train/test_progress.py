import pytest

from saf.train.observer import Observer
from saf.train.progress import Progress, duration


def tell(folder, updates: int, peak_flops: float | None = None, **options) -> None:
    progress = Progress(done=0, total=updates, **options)
    observer = Observer(
        folder,
        progress,
        tensorboard=False,
        purge_from=1,
        tokens_per_update=1000,
        flops_per_update=2e12,
        peak_flops=peak_flops,
    )
    for update in range(1, updates + 1):
        observer.updated(
            {"update": update, "tokens": update, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "update_seconds": 0.5}
        )
    observer.close()


def test_plain_lines_now_and_then_without_a_terminal(tmp_path, capsys):
    tell(tmp_path, 25, every=10)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["10/25", "20/25", "25/25"]
    assert lines[0].split("  ")[1:] == ["loss 2.5000", "lr 1.00e-03", "2,000 tokens/s", "8s left"]


def test_shows_utilisation_where_the_peak_is_known(tmp_path, capsys):
    tell(tmp_path, 1, peak_flops=1e13)
    assert "MFU 40.0%" in capsys.readouterr().err


def test_quiet_says_nothing(tmp_path, capsys):
    tell(tmp_path, 25, quiet=True)
    output = capsys.readouterr()
    assert output.err == output.out == ""


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0s"), (59.6, "60s"), (61, "1m 01s"), (7260, "2h 01m")])
def test_durations(seconds, text):
    assert duration(seconds) == text
