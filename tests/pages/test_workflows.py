"""Workflows and forms of issues: what they run is there, and it is what the project says it was run with."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchckpt.features import TESTED

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"
WORKFLOWS = sorted(FOLDER.glob("workflows/*.yml"))
FORMS = sorted(FOLDER.glob("ISSUE_TEMPLATE/*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def loaded(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(path)["jobs"].values() for step in job.get("steps", [])]


def test_the_commands_run_on_each_python_and_each_torch_that_is_named() -> None:
    matrix = loaded(FOLDER / "workflows" / "test.yml")["jobs"]["commands"]["strategy"]["matrix"]
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert (matrix["python"], matrix["torch"]) == (pythons, list(TESTED))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_target_of_make_is_there(path: Path) -> None:
    called = [line for step in steps_of(path) for line in step.get("run", "").splitlines() if line.startswith("make ")]
    targets = {word for line in called for word in line.split()[1:] if "=" not in word}
    rules = MAKEFILE.replace("$(VENV)", ".venv")
    assert [target for target in targets if not re.search(rf"^{re.escape(target)}:", rules, flags=re.MULTILINE)] == []
    assert called or path.stem == "release"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_pinned_to_a_commit_and_nothing_may_be_written_by_default(path: Path) -> None:
    used = [job["uses"] for job in loaded(path)["jobs"].values() if "uses" in job]
    used += [step["uses"] for step in steps_of(path) if "uses" in step]
    assert used
    assert [name for name in used if not re.search(r"@[0-9a-f]{40}$|^\./", name)] == []
    assert loaded(path)["permissions"] == {"contents": "read"}


def test_a_release_needs_the_tests_and_its_tag_is_the_version() -> None:
    workflow = loaded(FOLDER / "workflows" / "release.yml")
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML takes "on" for a truth
    assert jobs["publish"]["needs"] == ["test", "build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}  # for trusted publishing
    assert "token" not in str(jobs["publish"]["steps"])
    assert '"v$(python -c ' in str(jobs["build"]["steps"])
    assert {step["with"]["path"] for step in jobs["build"]["steps"] if step.get("with", {}).get("name") == "dist"} == {
        "build/dist"
    }


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_the_forms_of_issues_have_what_is_asked_for(path: Path) -> None:
    if path.stem == "config":
        assert loaded(path) == {"blank_issues_enabled": True}
        return
    form = loaded(path)
    assert {"name", "description", "body"} <= set(form)
    assert all(part["type"] == "textarea" and part["attributes"]["label"] and part["id"] for part in form["body"])


def test_a_bug_asks_for_the_environment() -> None:
    (env,) = [part for part in loaded(FOLDER / "ISSUE_TEMPLATE" / "bug.yml")["body"] if part["id"] == "env"]
    assert "python -m torchckpt env" in env["attributes"]["label"]
    assert env["validations"] == {"required": True}
