"""Hostile files for one reader, drawn towards code that none has reached before.

    .venv/bin/pip install atheris
    .venv/bin/python -m tests.fuzz.guided READER -max_total_time=600

READER is one of `tests.fuzz.readers.READERS`; what follows are libFuzzer's options. It
ends at the first case that fails; the tests draw without a guide.
"""

import sys

import atheris

import meshwright.layers  # noqa: F401 (before the rest, so that it is no guide)

# Where coverage counts: our readers, and libraries in Python that parse.
_GUIDES = ["meshwright.tasks", "nibabel", "polib", "scipy.io.wavfile"]

with atheris.instrument_imports(include=_GUIDES):
    from tests.fuzz import child, readers, test_readers


def main() -> None:
    """Runs until something fails or libFuzzer's options say to stop."""
    reader, watch = sys.argv.pop(1), child.Watch()

    def read(name, files):
        outcome = child.outcome(readers.READERS[name], files, watch)
        readers.forget()
        return outcome

    check = test_readers.checked(reader, read=read)
    atheris.Setup(sys.argv, check.hypothesis.fuzz_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
