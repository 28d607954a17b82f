"""The workflow that publishes: when it runs, and what it may do. No test runs it."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from build_ops_wheel import ROOT, VERSION

WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())
JOBS = WORKFLOW["jobs"]


def test_only_a_tag_publishes_and_only_the_job_that_does_gets_an_identity():
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as true.
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {name: job.get("permissions") for name, job in JOBS.items()} == {
        "build": None,
        "publish": {"id-token": "write"},
    }
    assert JOBS["publish"]["strategy"]["matrix"]["distribution"] == ["lit-fused", "lit-fused-ops"]


@pytest.mark.parametrize(("tag", "fits"), [(f"v{VERSION}", True), ("v9.9", False), ("v0.1", False)])
def test_a_tag_that_is_not_the_version_ends_it(tag: str, fits: bool):
    [check] = [step["run"] for step in JOBS["build"]["steps"] if step.get("name") == "The tag is the version"]
    done = subprocess.run(["bash", "-c", check], cwd=Path(ROOT), env=os.environ | {"GITHUB_REF_NAME": tag})
    assert (done.returncode == 0) == fits
