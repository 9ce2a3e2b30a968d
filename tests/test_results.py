"""The table of results by part of the suite, of a file as pytest writes it."""
from __future__ import annotations

from tests.results import table

FILE = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest">
<testcase classname="tests.regions.test_frame" name="a" />
<testcase classname="tests.regions.test_frame" name="b"><skipped message="no CUDA device">there</skipped></testcase>
<testcase classname="tests.regions.test_call.TestMore" name="c"><failure message="1 != 2">there</failure></testcase>
<testcase classname="tests.planning.remat.test_plan" name="d"><error message="no fixture">there</error></testcase>
<testcase classname="tests.command.test_command" name="e" /><testcase classname="tests.test_models" name="f" />
<testcase classname="tests.pages.test_readme" name="g" />
</testsuite></testsuites>"""


def test_a_file_is_a_row_and_reasons_stand_below(tmp_path):
    folder = tmp_path / "torch-9.1.0"
    folder.mkdir()
    (folder / "results.xml").write_text(FILE)
    assert table([folder / "results.xml"]).splitlines() == [
        "| passed / skipped / failed | regions | pipe | distributed | graph | planning | models | command | other |",
        "|---|---|---|---|---|---|---|---|---|",
        "| torch-9.1.0 | 1 / 1 / 1 | 0 / 0 / 0 | 0 / 0 / 0 | 0 / 0 / 0 | "  # and, from here on, the model
        "0 / 0 / 1 | 1 / 0 / 0 | 1 / 0 / 0 | 1 / 0 / 0 |",
        "",
        "regions, skipped, no CUDA device: torch-9.1.0: 1",
    ]
