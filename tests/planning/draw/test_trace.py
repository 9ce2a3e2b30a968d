"""What ui.perfetto.dev asks for: nothing overlaps on a row, times are microseconds, rows have names."""
from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from tests.planning.steps import EMPTY, measured, several_stages_a_rank, step
from torchckpt.planning.draw.trace import trace
from torchckpt.planning.draw.units import Units
from torchckpt.planning.step.timeline import Timeline

STEPS = {
    "p=2": step(2, 4, 0.25),
    "p=4": step(4, 8, 1.0),
    "thirds": step(4, 8, 1 / 3),
    "measured": measured(),
    **several_stages_a_rank(),
}


def entries(*timelines: Timeline, **options: Any) -> list[dict[str, Any]]:
    document = json.loads(trace(*timelines, **options))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    return list(document["traceEvents"])


def slices(timeline: Timeline) -> list[dict[str, Any]]:
    return [entry for entry in entries(timeline) if entry["ph"] == "X"]


@pytest.mark.parametrize("timeline", STEPS.values(), ids=STEPS)
def test_no_two_slices_of_a_row_overlap(timeline: Timeline) -> None:
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for entry in slices(timeline):
        start = round(entry["ts"] * 1000)  # nanoseconds, which the viewer counts in
        rows[entry["pid"], entry["tid"]].append((start, start + round(entry["dur"] * 1000)))
    assert len(rows) > len(timeline.schedule.placement)
    for row in rows.values():
        row.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(row))


@pytest.mark.parametrize("timeline", STEPS.values(), ids=STEPS)
def test_every_action_and_message_has_its_slice(timeline: Timeline) -> None:
    names = [entry["name"] for entry in slices(timeline)]
    computed = [name for name in names if "to" not in name]
    assert computed == [str(event.action) for event in timeline.events]
    assert len(names) - len(computed) == len(timeline.messages)


def test_names_of_processes_and_rows() -> None:
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in entries(step(2, 2)) if "name" in e["args"]}
    assert named == {
        ("process_name", 0, 0): "rank 0",
        ("thread_name", 0, 1): "stage 0 compute",
        ("thread_name", 0, 2): "stage 0 link out forward",
        ("thread_name", 0, 3): "stage 0 link out backward",
        ("process_name", 1, 0): "rank 1",
        ("thread_name", 1, 4): "stage 1 compute",
        ("thread_name", 1, 5): "stage 1 link out forward",
        ("thread_name", 1, 6): "stage 1 link out backward",
    }


def test_slices_of_a_measured_step_in_microseconds() -> None:
    assert [(s["tid"], s["name"], s["cat"], s["ts"], s["dur"]) for s in slices(measured())] == [
        (1, "0F0", "forward", 0.0, 31300.0),
        (4, "1F0", "forward", 34700.0, 30500.0),
        (4, "1B0", "backward", 65200.0, 64900.0),
        (1, "0B0", "backward", 133900.0, 67800.0),
        (2, "0F0 to stage 1", "forward", 31300.0, 3400.0),
        (6, "1B0 to stage 0", "backward", 130100.0, 3800.0),
    ]


def test_memory_is_a_counter_per_rank() -> None:
    counters = [e for e in entries(measured(), units=Units(memory="GB", bytes=1e9)) if e["ph"] == "C"]
    assert [(c["pid"], c["name"], c["ts"], c["args"]) for c in counters] == [
        (0, "memory", 0.0, {"GB": 3.0}),
        (0, "memory", 201700.0, {"GB": 0.0}),
        (1, "memory", 34700.0, {"GB": 3.0}),
        (1, "memory", 130100.0, {"GB": 0.0}),
    ]


def test_messages_that_take_no_time_have_no_slice() -> None:
    assert all("to" not in entry["name"] for entry in slices(step(2, 2, link=0.0)))


def test_several_steps_stand_one_under_the_other() -> None:
    listed = entries(step(2, 2), step(2, 2, 0.25), names=("before", "after"))
    processes = [(e["pid"], e["args"]["name"]) for e in listed if e["name"] == "process_name"]
    assert processes == [(0, "before: rank 0"), (1, "before: rank 1"), (2, "after: rank 0"), (3, "after: rank 1")]


def test_an_empty_step_is_a_valid_document() -> None:
    assert {entry["ph"] for entry in entries(EMPTY)} == {"M"}
    assert entries() == []
