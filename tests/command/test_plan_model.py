"""The command that plans a model that is never run."""
from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from torch import nn, ones

from tests.command.lines import printed, refused
from tests.slow import few, slow_but
from torchckpt import costs
from torchckpt.costs.mesh import layout_around
from torchckpt.planning.device import DEVICES

TINY = ("plan", "examples.plan_llama:tiny", "--device", "h100", "--schedule", "1f1b", "--microbatches", "4")


@pytest.fixture(scope="module")
def counted():
    """Costs by model, device and options."""
    return {}


@pytest.fixture(autouse=True)
def counted_once(monkeypatch, counted):
    """Tests of this file ask for few costs, and to count takes most of a command's seconds."""
    count = costs.pipeline_costs

    def once(build, device, **options):
        try:
            stages, *rest = build()
        except Exception:
            return count(build, device, **options)  # which explains it
        key = str((layout_around(), DEVICES[device], stages, [one.shape for one in rest[:1]], sorted(options.items())))
        if key not in counted:
            counted[key] = count(build, device, **options)
        return counted[key]

    monkeypatch.setattr(costs, "pipeline_costs", once)


def test_costs_the_plan_and_the_line_that_people_quote(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    lines = printed(capsys, *TINY, "--budget", "50%", "--svg", str(picture)).split("\n")
    assert lines[0] == "h100: by kind and size of operation, link 450 GB/s; of one micro-batch:"
    assert "1f1b: 4 stages on 4 ranks, 4 micro-batches" in lines
    assert lines[-2].startswith("step ")
    assert "recomputing all" in lines[-2]
    assert ElementTree.fromstring(picture.read_text(encoding="utf-8")).tag.endswith("svg")


def test_every_schedule_cuts_the_same_blocks(capsys):
    answer = json.loads(printed(capsys, *TINY, "--schedule", "all", "--budget", "60%", "--json"))
    assert {(row["schedule"], row["stages"]) for row in answer["schedules"]} >= {("1f1b", 4), ("zbv", 8)}


def test_options_reach_the_costs(capsys):
    def step(*options):
        call = "plan", "tests.command.test_plan_model:stages_of_mlps", *TINY[2:], "--budget", "100%", "--json"
        return json.loads(printed(capsys, *call, *options))["keep_all"]

    plain = step()
    assert step("--efficiency", "0.1") > step("--efficiency", "0.5")
    assert step("--dtype", "bf16") < plain
    assert step("--link-bandwidth", "1MB") > plain
    assert step("--link", "1") > 1
    assert step("--device", "a100") > plain
    assert step("--kernels", "cpu") > plain  # more of them


@pytest.mark.slow
def test_a_profile_has_the_seconds_of_this_machine(capsys):
    text = printed(capsys, *TINY, "--budget", "100%", "--profile")
    assert re.match(r"h100: seconds of this \w+, link 450 GB/s; of one micro-batch:", text)


def test_the_memory_of_the_device_is_the_budget_and_the_parameters(capsys):
    def budgets(*options):
        plan = printed(capsys, *TINY, "--json", *options)
        return json.loads(plan)["budget_bytes"]

    everything, half = budgets("--device-memory", "4MB"), budgets("--device-memory", "4MB", "--optimizer-bytes", "0")
    assert all(8 * 4e5 > more - less > 0 for more, less in zip(half, everything))
    assert max(half) < 4e6


@pytest.mark.slow
def test_a_state_that_is_sharded(capsys):
    def static(state):
        text = printed(capsys, *TINY, "--budget", "50%", "--json", "--optimizer-bytes", state)
        return json.loads(text)["plan"]["stages"]

    assert static("12/64") == static("0.1875")


def test_the_device_has_the_memory(capsys, monkeypatch):
    plan = json.loads(printed(capsys, *TINY, "--json"))
    usable = 0.95 * 80e9 - 1.5 * 2**30
    assert all(usable - 1e7 < budget < usable for budget in plan["budget_bytes"])
    monkeypatch.setitem(DEVICES, "h100", replace(DEVICES["h100"], memory_bytes=(4e6 + 1.5 * 2**30) / 0.95))
    same = json.loads(printed(capsys, *TINY, "--device-memory", "4MB", "--json"))["budget_bytes"]
    assert json.loads(printed(capsys, *TINY, "--json"))["budget_bytes"] == pytest.approx(same, abs=1)
    monkeypatch.setitem(DEVICES, "h100", replace(DEVICES["h100"], memory_bytes=1e6))
    error = refused(capsys, *TINY)
    assert "received: 0 bytes that h100 leaves to tensors, of which those of stage 0 take" in error
    assert "works: --budget 60GB, to plan activations alone" in error


def test_what_does_not_fit_the_device_is_said_first(capsys, monkeypatch):
    monkeypatch.setitem(DEVICES, "h100", replace(DEVICES["h100"], memory_bytes=1e6))
    lines = printed(capsys, *TINY, "--budget", "50%").split("\n")
    assert lines[0].startswith("this does not fit: h100 has 1 MB, and rank 0 holds 1611 MB of context, buffers and ")
    assert lines[0].endswith(" of activations")
    assert lines[2].startswith("h100: by kind and size")
    assert json.loads(printed(capsys, *TINY, "--budget", "50%", "--json"))["does_not_fit"] == lines[0]
    assert "does_not_fit" not in json.loads(printed(capsys, *TINY, "--device", "a100", "--budget", "50%", "--json"))


@few(1)
@pytest.mark.parametrize("target", [TINY[1:2], ("examples.plan_parallel:tiny", "--mesh", "dp=2,tp=2")])
def test_json_has_the_costs_that_the_tables_show(target, capsys):
    call = "plan", *target, *TINY[2:], "--budget", "50%"
    tables = printed(capsys, *call).split("\n\n")
    found = json.loads(printed(capsys, *call, "--json"))["costs"]
    names, *rows = (row.split() for row in tables[1].split("\n"))
    assert len(rows) == len(found["stages"]) > 1
    for row, stage in zip(rows, found["stages"]):
        assert row[1:3] == [str(stage["blocks"]), f"{stage['parameters'] / 1e9:.3g}"]
        scales = dict.fromkeys(("forward", "backward"), 1e3) | {"TFLOPs": 1e-12}
        cells = [cell for cell in row[4:] if cell not in ("ms", "GB")]
        assert cells == [f"{stage[name.replace('TFLOPs', 'flops')] * scales.get(name, 1e-9):.4g}" for name in names[3:]]
    stages = enumerate(found["stages"])
    sharded = [[str(stage), over or "nothing"] for stage, each in stages for over in each["sharded"]]
    if "--mesh" in target:
        assert [row.split()[:2] for row in tables[3].split("\n")[1:]] == sharded
        collectives = [row.split()[:2] for row in tables[4].split("\n")[1:]]
        assert collectives == [[each["phase"], each["kind"]] for each in found["collectives"]]


def test_memory_is_looked_at_before_anything_is_counted(capsys, monkeypatch):
    monkeypatch.setattr("torchckpt.costs.chain._each", None)
    assert "of which those of stage 0 take" in refused(capsys, *TINY, "--device-memory", "1kB")


def one_stage():
    from tests.costs.models import Mlp, vector

    return [nn.Sequential(*(Mlp() for _ in range(4)))], vector()


def stages_of_mlps():
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.Dropout(0.1)) for _ in range(4)]
    return [nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])], ones(4096, 1024)


STATES = [
    ("examples.plan_llama:tiny", ["--schedule", "1f1b"], "8"),
    ("examples.plan_llama:tiny", ["--schedule", "all"], "4"),
    ("examples.plan_llama:tiny", ["--schedule", "zbv", "--ranks", "2"], "8"),
    ("examples.plan_llama:tiny", ["--schedule", "1f1b", "--host", "1kB", "--host-link", "1MB"], "4"),
    ("tests.command.test_plan_model:one_stage", ["--schedule", "1f1b", "--balance"], "8"),
]


@few(1)
@pytest.mark.parametrize(
    ("target", "options", "state"),
    slow_but([*STATES[:3], STATES[4]], [(*one[:2], size) for one in STATES for size in ("8", "4")]),
)
def test_the_device_memory_that_an_error_names_is_enough(capsys, target, options, state):
    call = ("plan", target, *H100, "--microbatches", "4", *options, "--optimizer-bytes", state)
    left = json.loads(printed(capsys, *call, "--device-memory", "9MB", "--json"))["budget_bytes"]
    error = refused(capsys, *call, "--device-memory", f"{9e6 - min(left) + 100:.0f}B")
    assert f"received: {9e6 - min(left) + 100:.0f} bytes for rank" in error
    assert "--budget" not in error
    (enough,) = re.findall(r"works: --device-memory (\d+)B or more", error)
    assert f" needs {enough} bytes even if it recomputes everything" in error
    assert "step " in printed(capsys, *call, "--device-memory", f"{enough}B")
    assert "the device is too small" in refused(capsys, *call, "--device-memory", f"{int(enough) - 1}B")


def test_activations_alone_are_planned_without_device_memory(capsys):
    error = refused(capsys, *TINY, "--device-memory", "1kB")
    assert "works: --budget 60GB without --device-memory, to plan activations alone" in error
    printed(capsys, *TINY, "--budget", "60GB")


def two_stages():
    return [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))) for _ in range(2)], ones(8, 4)


TWO = ("plan", "tests.command.test_plan_model:two_stages", "--device", "h100")


@pytest.mark.parametrize("schedule", ["1f1b", "all"])
@pytest.mark.parametrize("budget", ["1%", "1B", "1B,2B"])
def test_the_budget_that_an_error_names_is_taken(capsys, schedule, budget):
    call = (*TWO, "--schedule", schedule, "--microbatches", "4", "--budget")
    (enough,) = re.findall(r"works: --budget (\S+) or more", refused(capsys, *call, budget))
    assert re.fullmatch(r"\d{2,4}B", enough)
    assert "step " in printed(capsys, *call, enough)


def test_a_file_of_another_number_of_stages(capsys, tmp_path):
    file = tmp_path / "order.csv"
    file.write_text("\n".join(f"{rank}F0,{rank}B0" for rank in range(4)), encoding="utf-8")
    error = refused(capsys, *TWO, "--csv", str(file), "--budget", "100%")
    rule = "plan: error: the model has another number of stages than the file"
    received = f"received: 2 stages of the model, 4 of {file}"
    assert error.endswith(f"{rule}; {received}; works: a file of 2, or --schedule gpipe --microbatches 1")
    assert "step " in printed(capsys, *TWO, "--schedule", "gpipe", "--microbatches", "1", "--budget", "100%")
    file.write_text("0F0,0B0\n1F0,1B0\n", encoding="utf-8")
    assert "step " in printed(capsys, *TWO, "--csv", str(file), "--budget", "100%")


NUMBERS = [
    (["--schedule", "1f1b"], "--schedule is given without --microbatches; works: --schedule 1f1b --microbatches 8"),
    (["--schedule", "1f1b", "--microbatches", "999999"], "received: --microbatches 999999; works: --microbatches 5000"),
    (["--schedule", "1f1b", "--microbatches", "4", "--ranks", "3"],
     "received: 2 stages of the model --ranks 3; works: 3 stages of the model --ranks 3"),
    (["--schedule", "zbv", "--microbatches", "4", "--ranks", "2"],
     "received: 2 stages of the model --ranks 2; works: 4 stages of the model --ranks 2"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), NUMBERS)
def test_no_option_says_the_stages_of_a_model(capsys, options, message):
    assert message in refused(capsys, *TWO, *options, "--budget", "100%")


def test_the_step_has_a_unit(capsys):
    lines = printed(capsys, *TINY, "--schedule", "all", "--budget", "60%").split("\n")
    assert re.match(r"step [\d.]+ ms, \+", lines[-2])
    rows = lines[lines.index(next(line for line in lines if line.startswith("schedule "))) + 1 :]
    assert " s  " in rows[0]


def test_a_csv_says_the_schedule(capsys, tmp_path):
    file = tmp_path / "order.csv"
    file.write_text("\n".join(["0F0,0B0", "1F0,1B0", "2F0,2B0", "3F0,3B0", ""]), encoding="utf-8")
    text = printed(capsys, *TINY[:4], "--csv", str(file), "--budget", "100%")
    assert "order: 4 stages on 4 ranks, 1 micro-batch\n" in text


@pytest.mark.slow
def test_a_mesh_has_a_share_of_each_stage(capsys):
    text = printed(capsys, "plan", "examples.plan_parallel:tiny", "--mesh", "dp=2,tp=2", *TINY[2:], "--budget", "100%")
    assert "optimizer: Adam's state; gathered: what FSDP2 has whole at once" in text
    assert "1f1b: 2 stages on 2 ranks, 4 micro-batches" in text
    assert [line.split() for line in text.splitlines() if line.startswith("replay")] == [
        ["replay", "all_gather", "tp", "(2)", "0.01638", "MB", "2"],
        ["replay", "reduce_scatter", "tp", "(2)", "0.01638", "MB", "1"],
    ]


WORDS = "examples.plan_llama:tiny"
H100 = ("--device", "h100")
HALF = (*H100, "--budget", "50%")
BAD = [
    ((WORDS, "--budget", "50%"), "the model has no device; works: plan examples.plan_llama:tiny --device h100"),
    ((WORDS, "--profile"), "the model has no device; works: plan examples.plan_llama:tiny --device h100 --profile"),
    ((WORDS, "--device", "tpu", "--budget", "50%"), "the device is not one of a100, h100, h200, b200, mi300x"),
    ((WORDS, *H100, "--budget", "80"), "the budget is no size; received: --budget 80 (it has no unit); works"),
    ((WORDS, *H100, "--device-memory", "80"), "not a size such as 80GB or 60GiB; received: 80 (it has no unit)"),
    ((WORDS, *H100, "--budget", "1GB", "--device-memory", "1GB"), "--budget and --device-memory are both given"),
    ((WORDS, *H100, "--device-memory", "1GX"), "not a size such as 80GB or 60GiB; received: 1GX"),
    ((WORDS, *H100, "--device-memory", "1kB"), "received: 1000 bytes, of which those of stage 0 take "),
    ((WORDS, *H100, "--budget", "1kB"), "the budget is too small"),
    ((WORDS, *HALF, "--blocks", "8"), "--blocks is given beside a model; examples.plan_llama"),
    ((WORDS, *HALF, "--stages", "4"), "--stages is given beside a model"),
    ((WORDS, *HALF, "--dtype", "int4"), "argument --dtype: invalid choice: 'int4'"),
    ((WORDS, *HALF, "--efficiency", "2"), "argument --efficiency: not a share above 0 and at most 1"),
    ((WORDS, *HALF, "--efficiency", "0"), "such as 0.5; received: 0"),
    ((WORDS, *HALF, "--kernels", "gpu"), "argument --kernels: invalid choice: 'gpu'"),
    ((WORDS, *HALF, "--optimizer-bytes", "-1"), "a number from 0"),
    ((WORDS, *HALF, "--optimizer-bytes", "12/0"), "not a number from 0 such as 12, or 12/64; received: 12/0"),
    (("nowhere:stages", *HALF), "cannot make nowhere:stages: ModuleNotFoundError"),
    (("examples.plan_llama:none", *HALF), "examples.plan_llama has no none; works: examples.plan_llama:"),
    (("examples.plan_llama", *HALF), "the target is not written module:function"),
    (("examples.plan_llama:__doc__", *HALF), "the target is not a function; received: "),
    (("examples.plan_parallel:tiny", *HALF, "--mesh", "dp=2,8"), "by name such as dp=2,tp=8; received: dp=2,8"),
    (("examples.plan_parallel:tiny", *HALF, "--mesh", "tp=0"), "not sizes by name such as dp=2,tp=8; received: tp=0"),
    (("examples.plan_parallel:tiny", *HALF), "missing 1 required positional argument: 'mesh'"),
    (("examples.plan_parallel:tiny", *HALF, "--mesh", "tp=2"), "KeyError"),
    ((WORDS, *HALF, "--profile", "--mesh", "tp=2"), "--profile and --mesh are both given, and the ranks of a mesh are"),
    ((WORDS, *HALF, "--profile", "--efficiency", "0.4"), "--profile and --efficiency are both given, and what is run"),
    (("--profile", "--blocks", "8", "--budget", "50%"), "--profile is given without a model; works: plan my_package"),
    (HALF, "--device is given without a model; works: plan my_package.model:stages"),
    (("--budget", "50%"), "the following arguments are required: --blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert message in refused(capsys, "plan", "--schedule", "1f1b", "--microbatches", "4", *arguments)


@pytest.mark.parametrize("wrong", [
    (WORDS,), (WORDS, *HALF, "--stages", "2"), (WORDS, *H100, "--microbatches", "4"),
    (WORDS, "--schedule", "1f1b", "--microbatches", "4"),
    (WORDS, "--schedule", "1f1b", "--microbatches", "4", "--profile", "--device", "h100", "--efficiency", "0.5"),
    (*H100, "--schedule", "1f1b", "--microbatches", "4"),
])  # fmt: skip
def test_the_call_that_a_message_names_works(capsys, wrong):
    call = refused(capsys, "plan", *wrong).strip().partition("; works: ")[2].replace("my_package.model:stages", WORDS)
    assert "1f1b: 4 stages on 4 ranks, 8 micro-batches" in printed(capsys, *call.split())
