"""Cases judged in another process: where XLA ends it, the next go on."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import itertools
import multiprocessing
import re
import signal
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from unittest import mock

import jax
from tensorflow.python.framework import ops

from meshwright.framework import set_platform
from meshwright.framework.compiler.lowering.lower import LoweringError
from meshwright.framework.compiler.repair import check
from meshwright.framework.compiler.repair.table.faults import FAULTS
from meshwright.framework.compiler.stablehlo.rewrites import workarounds
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.mesh import did_you_mean
from tests.operators.judging.cases import Case, compiled, run, wanted

# A program of some cases takes a second or two.
_TIMEOUT = 300
# Each program leaves some megabytes behind.
_PROGRAMS_IN_A_PROCESS = 150
_NO_KERNEL = re.compile(
    "it has no kernel for|No OpKernel was registered|Could not find device for node"
)
_ROWS = [row.name for row in (*FAULTS, *workarounds.WORKAROUNDS)]


class Outcome(enum.Enum):
    """What became of a case."""

    RIGHT = "right"
    WRONG = "wrong"
    DECLINED = "refused as documented"  # Before XLA, which would end the process.
    UNREPAIRED = "refused by us"  # A LoweringError; no drawn case should be refused.
    NO_KERNEL = "no kernel"  # TF, or TF2XLA, has none for this device.
    REFUSED = "refused by XLA"
    ENDED = "process ended"
    STUCK = "stuck"
    FAILED = "error of the test"  # Such as an expression that TF does not take.

    @property
    def is_fault(self) -> bool:
        return self not in (Outcome.RIGHT, Outcome.DECLINED)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a case, and what was said."""

    outcome: Outcome
    text: str = ""
    seconds: float = dataclasses.field(default=0.0, compare=False)  # Of all cores.
    repairs: tuple[str, ...] = ()  # Faults that its program would meet.

    @property
    def kind(self) -> str:
        """Alike for what probably has one cause."""
        if self.outcome is Outcome.WRONG:
            return f"wrong {self.text.partition(':')[0]}"
        words = re.sub(r"[\d.,]+|%[\w.-]+|'[^']*'|\[.*?\]", "", self.text)
        return f"{self.outcome.value}: {words[:60]}"


def judge(
    cases: Sequence[Case], partitioner: Partitioner, *, without: Collection[str] = ()
) -> list[Verdict]:
    """What becomes of each case, all of one mesh in a program if it compiles and runs.

    As if the tables of faults and of workarounds had no rows named as in `without`.

    Raises:
      ValueError: they have no such row.
    """
    _check_rows(without)
    if not cases:
        return []
    if len({case.mesh for case in cases}) > 1:
        return [v for c in cases for v in judge([c], partitioner, without=without)]
    judged = _JUDGE.judge(cases, partitioner, without)
    if isinstance(judged, list):
        return judged
    if len(cases) == 1:
        return [judged]
    half = len(cases) // 2
    apart = [
        *judge(cases[:half], partitioner, without=without),
        *judge(cases[half:], partitioner, without=without),
    ]
    if judged.outcome.is_fault and not any(v.outcome.is_fault for v in apart):
        listed = "\n".join(map(str, cases))
        text = f"{judged.text}\nOnly these together:\n{listed}"
        apart[0] = dataclasses.replace(apart[0], outcome=judged.outcome, text=text)
    return apart


def _check_rows(names: Collection[str]) -> None:
    """Refuses names that no row of the tables of faults and of workarounds has."""
    if isinstance(names, str):
        raise ValueError(f"names of rows are {names!r}: give a tuple, ({names!r},)")
    for name in names:
        if name not in _ROWS:
            raise ValueError(
                "the tables of faults and of workarounds have no row "
                f"{name!r}{did_you_mean(name, _ROWS)}"
            )


class _Judge:
    """A process that runs programs, and its successors."""

    def __init__(self):
        self.process = None
        self.programs = 0

    def judge(self, cases, partitioner, without) -> list[Verdict] | Verdict:
        """A verdict on each case, or one on a program that gave no numbers."""
        if self.programs >= _PROGRAMS_IN_A_PROCESS:
            self.end()
        if self.process is None:
            self.start()
        self.programs += 1
        try:
            self.pipe.send((cases, partitioner, without))
            if not self.pipe.poll(_TIMEOUT):
                self.end()
                return Verdict(Outcome.STUCK, f"no numbers after {_TIMEOUT} s")
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            code, self.process = self.process.exitcode, None
        except BaseException:  # Else the next call would receive this one's verdicts.
            self.end()
            raise
        by = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return Verdict(Outcome.ENDED, by)

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")  # A fork lacks JAX's threads.
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # Else no end of the process would be seen here.
        self.programs = 0

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process = None


_JUDGE = _Judge()


def _serve(pipe) -> None:
    set_platform("cpu", 8)
    gc.freeze()  # Collections need not look at what was imported.
    for number in itertools.count(1):
        try:
            cases, partitioner, without = pipe.recv()
        except EOFError:  # The tests are over.
            return
        start = time.process_time()
        with left_out(without):
            verdicts = _verdicts(cases, partitioner)
        if number % 10 == 0:
            _forget()
        took = time.process_time() - start
        if isinstance(verdicts, list):
            each = took / len(cases)
            verdicts = [dataclasses.replace(v, seconds=each) for v in verdicts]
        pipe.send(verdicts)


def _verdicts(cases, partitioner) -> list[Verdict] | Verdict:
    try:
        want = wanted(cases)
    except Exception as e:
        outcome = Outcome.NO_KERNEL if _NO_KERNEL.search(str(e)) else Outcome.FAILED
        return Verdict(outcome, traceback.format_exc())
    try:
        values = [case.use.values for case in cases]
        program = compiled(cases, partitioner, values)
        result = program.unshard(program(*values))
    except LoweringError as e:
        declined = partitioner is Partitioner.GSPMD and any(c.region for c in cases)
        return Verdict(_refusal(e, may_decline=declined), str(e))
    except Exception as e:
        refused = type(e).__name__ == "JaxRuntimeError"
        text = str(e).partition("Suspected Python Code Location")[0]
        text = text if refused else traceback.format_exc()
        return Verdict(Outcome.REFUSED if refused else Outcome.FAILED, text)
    complaints = [
        _complaint(case, *pair) for case, *pair in zip(cases, result, want, strict=True)
    ]
    # The first says what was repaired for all of them.
    repairs = [tuple(repair.fault.name for repair in program.repairs)]
    return [
        Verdict(Outcome.WRONG if c else Outcome.RIGHT, c or "", repairs=faults)
        for c, faults in itertools.zip_longest(complaints, repairs, fillvalue=())
    ]


def _refusal(error: LoweringError, may_decline: bool) -> Outcome:
    if _NO_KERNEL.search(str(error)):
        return Outcome.NO_KERNEL
    if error.__cause__ is not None:
        return Outcome.REFUSED
    documented = "in a manual subgroup, which GSPMD cannot partition" in str(error)
    return Outcome.DECLINED if may_decline and documented else Outcome.UNREPAIRED


def _complaint(case: Case, got: dict, want: dict) -> str | None:
    """What is wrong, unless one device computes the same in a format of few digits."""
    complaint = case.complaint(got, want)
    if complaint and case.use.digits < 24:
        (alone,) = run([case.on_one_device()])
        return complaint if case.complaint(got, alone) else None
    return complaint


@contextlib.contextmanager
def left_out(names: Collection[str]) -> Iterator[None]:
    """Rows of the tables of faults and of workarounds are not applied.

    Nor are the ops of such faults kept as they were looked at.

    Raises:
      ValueError: the tables have no such row.
    """
    _check_rows(names)
    faults = [row for row in check.PRESENT if row.name not in names]
    guarded = frozenset(op for row in faults for op in row.ops)
    kept = [row for row in workarounds.WORKAROUNDS if row.name not in names]
    with (
        mock.patch.multiple(check, PRESENT=faults, GUARDED=guarded),
        mock.patch.object(workarounds, "WORKAROUNDS", kept),
    ):
        yield


def _forget() -> None:
    """What JAX and TF keep of programs that are done."""
    jax.clear_caches()
    gradients = ops.gradient_registry._registry
    for name in [name for name in gradients if name.startswith("CustomGradient-")]:
        del gradients[name]
    gc.collect()
