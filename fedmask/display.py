"""What a person sees of a run: a live line on a terminal, one line a round elsewhere, and a table."""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from fedmask.errors import FedmaskError
from fedmask.federated import Progress, RoundRecord

__all__ = ["RunDisplay", "number", "percent", "rounds_table", "run_app"]


class RunDisplay:
    """Shows a run as it goes; give :meth:`update` to ``simulate`` as ``on_progress``."""

    def __init__(
        self,
        rounds: int,
        cohort: int,
        *,
        done: int = 0,
        quiet: bool = False,
        label: str = "",
        suffix: Callable[[int], str] = lambda round_: "",
    ) -> None:
        """A run of ``rounds`` rounds, ``done`` of which are done already; ``suffix`` ends the line of a round."""
        self._console = Console(stderr=True, quiet=quiet)
        self._live = self._console.is_terminal and not quiet
        self._suffix = suffix
        self._rounds, self._cohort, self._label = rounds, cohort, f"{label} " if label else ""
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        # Counted in clients, so that the time left is known before the first round is over.
        self._task = self._bars.add_task(
            f"{self._label}round {done + 1}", total=rounds * cohort, completed=done * cohort
        )

    def __enter__(self) -> "RunDisplay":
        """Start showing."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""
        self._bars.stop()

    def update(self, progress: Progress) -> None:
        """Take in that a client or a round is done."""
        if progress.record is None:
            completed = (progress.round - 1) * self._cohort + progress.clients_done
            self._bars.update(self._task, completed=completed)
            return
        suffix = self._suffix(progress.round)
        line = f"{self._label}round {progress.round}/{self._rounds}  {_figures(progress.record)}{suffix}"
        self._bars.update(self._task, completed=progress.round * self._cohort, description=line)
        if not self._live:
            self._console.print(line, highlight=False, soft_wrap=True)


def rounds_table(records: Sequence[Mapping[str, Any]], title: str, *, most: int = 20) -> Table:
    """The last ``most`` rounds of a run as a table."""
    table = Table(title=title, title_justify="left")
    for column in ("round", "1/Δ_S", "weighted", "signal", "noise", "accuracy", "train loss"):
        table.add_column(column, justify="right")
    for record in records[-most:]:
        table.add_row(
            str(record["round"]),
            number(record["recovery_factor"]),
            number(record["recovery_factor_weighted"]),
            number(record["signal"]),
            number(record["noise"]),
            percent(record["accuracy"]),
            number(record["train_loss"]),
        )
    return table


def number(value: float | None) -> str:
    """Three significant digits; a dash for what is undefined or was not measured."""
    if value is None:
        return "–"
    return f"{value:.2e}" if value != 0 and not 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share in percent with one decimal; a dash for what was not measured."""
    return "–" if value is None else f"{100 * value:.1f} %"


def _figures(record: RoundRecord) -> str:
    accuracy = "" if record.accuracy is None else f"accuracy {percent(record.accuracy)}  "
    return (
        f"{accuracy}1/Δ_S {number(record.recovery_factor)}  "
        f"signal {number(record.signal)}  noise {number(record.noise)}"
    )


def run_app(app: Callable[[], object], name: str) -> None:
    """Run a command line in UTF-8 whatever the terminal's encoding; an expected error is one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        app()
    except FedmaskError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        hint = "what was written before is whole: mend it and run the same command again"
        print(f"{name}: {error}; {hint}", file=sys.stderr)
        sys.exit(2)
