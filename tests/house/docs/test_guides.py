"""What the guides show of outputs is what is printed today."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests import needs

GUIDES = pathlib.Path(__file__).parents[3] / "docs" / "guides"


@needs.libtpu
@pytest.mark.slow  # Compiles the default job for a TPU.
def test_the_plan_is_what_is_printed():
    text = (GUIDES / "5_plan_for_machines_you_do_not_have.md").read_text()
    (shown,) = re.findall(r"```\n(Plan of .*?)```", text, re.DOTALL)
    code = "from meshwright.trainers.plan import run; run()"
    flags = ["--gin_file=lm/stdlib_tiny.gin", "--topology=v5e:2x4"]
    command = [sys.executable, "-c", code, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert shown in done.stdout, done.stdout + done.stderr
