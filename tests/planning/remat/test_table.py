"""A plan as text, letter for letter."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planning.remat.test_plan_svg import REPEATING, uneven
from torchckpt.errors import ArgumentError
from torchckpt.planning.remat.table import Row, plan_rows, table

AMOUNTS = {"peak": 22_700_000, "budget": 23_100_000, "eager peak": 57_900_000, "lower bound": 9_100_000}
MB = 10**6


def gpt(layers: int = 24, recomputed: int = 14) -> list[Row]:
    """The first layers recompute what is cheap."""
    sizes = {"ln_1": 6, "attn.qkv": 18, "attn.out": 6, "ln_2": 6, "mlp.fc": 24, "mlp.act": 24}
    rows = [Row("wte", 40 * MB)]
    for layer in range(layers):
        for name, size in sizes.items():
            if layer < recomputed and name in ("ln_1", "ln_2", "mlp.act"):
                rows.append(Row(f"h.{layer}.{name}", 0, size * MB, 2, 3 * size * MB))
            else:
                rows.append(Row(f"h.{layer}.{name}", size * MB))
    return [*rows, Row("lm_head", 500 * MB)]


def names(rows: list[Row]) -> list[list[str]]:
    """The first two columns, without heads and total."""
    lines = table(rows, AMOUNTS, 0.127).split("\n\n")[1].split("\n")[1:-1]
    return [[cell for cell in line.split()[:2] if not cell[:1].isdigit() and cell != "-"] for line in lines]


def test_a_plan_of_many_layers() -> None:
    assert table(gpt(), AMOUNTS, 0.127).split("\n") == [
        "peak         22.7 MB   39.2 % of eager",
        "budget       23.1 MB   39.9 % of eager",
        "eager peak   57.9 MB  100.0 % of eager",
        "lower bound   9.1 MB   15.7 % of eager",
        "recompute              12.7 % of the eager step's time",
        "",
        "module                saved MB  dropped MB  repeats  recompute GFLOP",
        "wte                         40           -        -                -",
        "h.0-13.ln_1      x14         -          84       28            0.252",
        "h.14-23.ln_1     x10        60           -        -                -",
        "h.*.attn.qkv     x24       432           -        -                -",
        "h.*.attn.out     x24       144           -        -                -",
        "h.0-13.ln_2      x14         -          84       28            0.252",
        "h.14-23.ln_2     x10        60           -        -                -",
        "h.*.mlp.fc       x24       576           -        -                -",
        "h.0-13.mlp.act   x14         -         336       28            1.008",
        "h.14-23.mlp.act  x10       240           -        -                -",
        "lm_head                    500           -        -                -",
        "total                     2052         504       84            1.512",
    ]


def test_without_a_budget_or_rows() -> None:
    assert table([], {name: amount for name, amount in AMOUNTS.items() if name != "budget"}, 0.0).split("\n") == [
        "peak         22.7 MB   39.2 % of eager",
        "eager peak   57.9 MB  100.0 % of eager",
        "lower bound   9.1 MB   15.7 % of eager",
        "recompute               0.0 % of the eager step's time",
        "",
        "module    saved B  dropped B  repeats  recompute FLOP",
        "total           -          -        -               -",
    ]


def test_of_an_eager_step_without_memory_there_are_no_shares() -> None:
    text = table([], dict.fromkeys(("peak", "eager peak", "lower bound"), 0), 0.0)
    assert text.startswith("peak         0 B\neager peak   0 B\nlower bound  0 B\n")


def test_siblings_are_one_row_only_if_their_numbers_are_the_same() -> None:
    rows = [Row(f"layers.{i}.mlp", kept_bytes=5 if i in (2, 3, 4, 7) else 6) for i in range(9)]
    assert names(rows) == [["layers.0-1,5-6,8.mlp", "x5"], ["layers.2-4,7.mlp", "x4"]]


def test_stages_of_blocks() -> None:
    rows = [Row(f"stages.{i}.{j}.conv", kept_bytes=1) for i in range(3) for j in range(4)]
    assert names(rows) == [["stages.*.*.conv", "x12"]]
    rows = [Row(f"stages.{i}.{j}.conv", kept_bytes=1 + i) for i in range(3) for j in range(4)]
    assert names(rows) == [[f"stages.{i}.*.conv", "x4"] for i in range(3)]
    rows = [Row(f"stages.{i}.{j}.conv", kept_bytes=1) for i, count in enumerate((2, 3, 2)) for j in range(count)]
    assert names(rows) == [["stages.0,2.*.conv", "x4"], ["stages.1.*.conv", "x3"]]


def test_what_is_told_as_one_covers_exactly_its_members() -> None:
    rows = [Row(f"a.{i}.{j}", kept_bytes=1 + (i == j)) for i in range(2) for j in range(2)]
    assert names(rows) == [["a.0.0"], ["a.0.1"], ["a.1.0"], ["a.1.1"]]


def test_one_name_twice_is_one_module() -> None:
    assert names([Row("a", kept_bytes=1), Row("a", dropped_bytes=2)]) == [["a"]]


def test_layers_that_all_differ_are_told_together() -> None:
    rows = [Row(f"h.{i}.{name}", kept_bytes=1 + i) for i in range(24) for name in ("attn", "mlp")]
    assert table(rows, AMOUNTS, 0.127).split("\n")[-3:] == [
        "h.*.attn  x24      300          -        -               -",
        "h.*.mlp   x24      300          -        -               -",
        "total              600          -        -               -",
    ]


def test_modules_of_too_many_parts_are_told_by_what_holds_them() -> None:
    rows = [Row(f"net.stage{i}.part{j}.conv", kept_bytes=1) for i in range(5) for j in range(20)]
    assert names(rows) == [[f"net.stage{i}"] for i in range(5)]


def test_of_too_many_modules_the_largest_are_told() -> None:
    rows = [Row(f"part{chr(97 + i // 26)}{chr(97 + i % 26)}", kept_bytes=i + 1) for i in range(100)]
    lines = table(rows, AMOUNTS, 0.127).split("\n")
    assert len(lines) < 40
    assert (sum(range(1, 74)), sum(range(1, 101))) == (2701, 5050)
    assert lines[-2:] == [
        "others  x73     2.701           -        -               -",
        "total            5.05           -        -               -",
    ]
    assert names(rows)[0] == ["partcv"]


def test_long_names_keep_their_end_and_the_table_its_width() -> None:
    rows = [Row(f"{'x' * 60}.{i}.mlp", 10**17 + i, 10**17, 123456, 10**17) for i in range(2)]
    text = table(rows, dict.fromkeys(AMOUNTS, 10**17), 99.0)
    assert "..." + "x" * 31 + ".0.mlp" in text
    assert max(map(len, text.split("\n"))) <= 100


def test_rows_of_a_plan() -> None:
    flow = uneven()
    flow = replace(flow, operations=tuple(replace(op, flops=100) for op in flow.operations))
    paths = ["stem", "layers.0", "layers.1", "layers.1", "layers.0", "stem"]
    assert plan_rows(flow, flow.eager, paths) == [Row("stem", 40), Row("layers.0", 80), Row("layers.1", 10)]
    assert plan_rows(flow, REPEATING, paths) == [Row("stem", 40), Row("layers.0", 0, 80, 1, 0), Row("layers.1", 10)]


def test_a_path_for_each_operation() -> None:
    with pytest.raises(ArgumentError, match=r"plan_rows\(\): there is not one path for each of 6 op.*\n.*1 paths"):
        plan_rows(uneven(), uneven().eager, ["a"])
