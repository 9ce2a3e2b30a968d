"""What torch has for each feature: the table of the site, this torch, and one that lacks something or is newer."""
from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from torchckpt.features import FEATURES, TESTED, Feature, release_of, table, warn_of_newer_torch
from torchckpt.regions import private

ROOT = Path(__file__).parent.parent


def test_the_site_has_the_table():
    assert table() in (ROOT / "docs" / "versions.md").read_text()


@pytest.mark.parametrize("file", ["README.md", "docs/versions.md"])
def test_the_tested_releases_are_told(file):
    assert f"{', '.join(TESTED[:-1])} and {TESTED[-1]}" in (ROOT / file).read_text()


@pytest.mark.filterwarnings("ignore")  # of torch's modules that are imported for the first time
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_this_torch_has_what_the_table_says(feature):
    is_due = release_of(torch.__version__) >= release_of(feature.since)
    assert (feature.missing() == ()) == is_due
    assert is_due or feature.since in TESTED


def test_what_is_missing_is_named():
    needs = ("torch:no_such_name", "torch.no_such_module:name", "torch.nn:Module.no_such_method", "torch:Tensor")
    assert Feature("", "2.11", needs, "").missing() == needs[:3]


def test_release_of_a_version():
    assert [release_of(text) for text in ("2.15.0+cpu", "2.9.1", "2.16.0a0+git0", "3.0.0.dev1")] == [
        *((2, 15), (2, 9), (2, 16), (3, 0)),
    ]


def test_a_newer_torch_is_one_warning():
    warn_of_newer_torch.cache_clear()
    major, minor = release_of(TESTED[-1])
    with pytest.warns(UserWarning, match=rf"tested with torch 2\.11 to {TESTED[-1]}\n  received: torch 2\.\d+\.0\n"):
        warn_of_newer_torch(f"{major}.{minor + 1}.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_newer_torch(f"{major}.{minor + 1}.0")
        for release in TESTED:
            warn_of_newer_torch(f"{release}.1+cpu")
    warn_of_newer_torch.cache_clear()


def again():
    """The private names of regions, imported once more."""
    spec = importlib.util.spec_from_file_location("again", Path(private.__file__))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_what_dynamo_skips_by_functions_stay_as_they_are(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    again().keep_from_dynamo(again)


def test_a_newer_torch_is_told_at_import(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.1.0")
    with pytest.warns(UserWarning, match=r"received: torch 99\.1\.0"):
        again()
    warn_of_newer_torch.cache_clear()
