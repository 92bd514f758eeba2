"""Whatever is in a file, reading it gives what is right or an error that names it."""

import os
import re
import zlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from meshwright.trainers.startup.messages import printable
from tests.fuzz.child import Ending, Outcome, read
from tests.fuzz.hostile import cases
from tests.fuzz.readers import READERS
from tests.fuzz.valid import VALID

# `make fuzz` draws that many, others for each seed.
CASES = int(os.environ.get("FUZZ_CASES", 0))
SEED = os.environ.get("FUZZ_SEED", "")
# Of which so many are drawn otherwise; a batch of pictures takes a tenth of a second.
FEW = {"pictures": 10, "pairs": 30, "gin": 40}
OTHERS = 60


def complaint(reader: str, outcome: Outcome) -> str | None:
    """What is wrong with how a case ended, if anything."""
    if outcome.did:
        return f"did {outcome.did}"
    if outcome.ending not in (Ending.READ, Ending.REFUSED):
        return f"{outcome.ending.value}: {outcome.message}\n{outcome.traceback}"
    refused = outcome.ending is Ending.REFUSED
    if refused and (why := told_badly(reader, outcome.message)):
        return f"the message {why}:\n{outcome.message}\n{outcome.traceback}"
    return None


def told_badly(reader: str, message: str) -> str | None:
    """What is wrong with the message of an error, as the binaries print it."""
    text, (hostile, *_) = printable(message), VALID[reader]
    # What gin makes of a file is named by class and parameter.
    if reader != "gin" and not re.search(
        rf"{os.path.basename(hostile)}|/fuzz", message
    ):
        return "does not name the file"
    if "Traceback" in message:
        return "has a traceback"
    if not text.replace("\n", "").isprintable():
        return "has characters that do not print"
    return None


def checked(reader: str, count: int = 1, read: Callable[..., Outcome] = read):
    """A test of hypothesis: so many files drawn for a reader end well."""

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(cases(reader))
    def check(files):
        assert complaint(reader, read(reader, files)) is None

    return check


@pytest.mark.parametrize("reader", READERS)
def test_valid_files_are_read(reader):
    assert read(reader, VALID[reader]) == Outcome(ending=Ending.READ)


@pytest.mark.parametrize("reader", READERS)
def test_hostile_files(reader):
    check = checked(reader, CASES or FEW.get(reader, OTHERS))
    seed(zlib.crc32(f"{reader} {SEED}".encode()))(check)()
