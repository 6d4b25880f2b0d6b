import pytest

from benchmarks.results import save


def pytest_addoption(parser):
    parser.addoption("--write", action="store_true", help="write benchmarks/RESULTS.md from what this run finds")


@pytest.fixture(scope="session")
def report(request):
    """Print a table and, with --write, keep it."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def print_and_keep(part, columns, rows, notes=()):
        if not rows:  # none of the part was chosen
            return
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        with capture.global_and_fixture_disabled():
            print(f"\n\n{part}")
            for row in [columns, *rows]:
                cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
                print("  ".join(cells))
            for note in notes:
                print(note)
        if request.config.getoption("--write"):
            save(part, columns, rows, notes)

    return print_and_keep
