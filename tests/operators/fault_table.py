"""The tables of faults and of workarounds in docs/internals/operators.md.

Run, it rewrites them: python -m tests.operators.fault_table
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping

from absl import logging

from meshwright.framework import set_platform
from meshwright.framework.compiler.repair.table.fault import Fault
from meshwright.framework.compiler.repair.table.faults import FAULTS
from meshwright.framework.compiler.stablehlo.rewrites.known_fault import (
    KnownFault,
    Smallest,
)
from meshwright.framework.compiler.stablehlo.rewrites.workarounds import WORKAROUNDS
from meshwright.framework.compiler.xla.jax_bridge import JAXLIB
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.judging.cases import Case, compiled
from tests.operators.judging.printed import case_of
from tests.operators.known_failures import OF_FAULTS, KnownFailure

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "internals" / "operators.md"
OF = ("faults", "workarounds")
Bytes = Mapping[str, int]
"""What repairs send to each device, by a known failure's name."""


def _place(of: str) -> re.Pattern:
    start = f"<!-- the table of {of} -->\n"
    return re.compile(f"(?<={start}).*?(?=<!-- its end -->)", re.S)


def on_page(of: str) -> str:
    """The tables of faults, or of workarounds, as the page has them."""
    return _place(of).search(PAGE.read_text())[0]


def bytes_on_page() -> dict[str, int]:
    """What the page says of each known failure that a fault is."""
    pattern = r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$"
    costs = {}
    for name, cell in re.findall(pattern, on_page("faults"), re.MULTILINE):
        shardy, _, other = cell.partition(", GSPMD ")
        costs[f"{name}-{Partitioner.SHARDY.value}"] = int(shardy)
        costs[f"{name}-{Partitioner.GSPMD.value}"] = int(other or shardy)
    return {f.name: costs[f.name] for f in OF_FAULTS if f.name in costs}


def measured(failure: KnownFailure) -> int:
    """The bytes of all repairs of the program, and of its gradients.

    Raises:
      ValueError: it does not meet the fault that it is to show, or the layout that the
        fault chooses does not help.
    """
    program = compiled([failure.case], failure.partitioner, [failure.case.use.values])
    met = {repair.fault.name for repair in program.repairs}
    if failure.fault.is_in(JAXLIB) and failure.fault.name not in met:
        others = f" but {', '.join(map(repr, sorted(met)))}" if met else ""
        raise ValueError(
            f"program {failure.name!r} does not meet its row "
            f"{failure.fault.name!r}{others}, so that nothing shows the fault: give "
            "the row a smallest program that meets it, or widen its condition"
        )
    for repair in program.repairs:
        if repair.is_last:
            raise ValueError(
                f"the layout that row {repair.fault.name!r} chooses for program "
                f"{failure.name!r} is not kept, or meets a row too, so that the "
                "compiler replicates the op instead: keep fewer factors"
            )
    return sum(repair.bytes for repair in program.repairs)


def tables(of: str, costs: Bytes) -> str:
    """The tables as the page is to have them."""
    if of == "faults":
        rows = _table(
            ["fault", "an op meets it that", "layout instead", *_UPSTREAM],
            [_row(fault, _met_by(fault)) for fault in FAULTS],
        )
        programs = _table(
            [*_PROGRAM, "bytes"],
            [
                [*_program(fault, name, smallest), _bytes(name, costs)]
                for fault, name, smallest in _smallest(FAULTS)
            ],
        )
    else:
        rows = _table(
            ["workaround", "what XLA does", "instead", *_UPSTREAM],
            [_row(workaround, workaround.what) for workaround in WORKAROUNDS],
        )
        programs = _table(
            _PROGRAM, [_program(*program) for program in _smallest(WORKAROUNDS)]
        )
    return "\n".join(["", *rows, "", *programs, "", ""])


_UPSTREAM = ["fixed in XLA", "reported"]
_PROGRAM = ["program", "meets", "what it computes, how split", "left to XLA"]


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def _smallest(rows: Iterable[KnownFault]) -> list[tuple[KnownFault, str, Smallest]]:
    return [
        (row, name, program) for row in rows for name, program in row.smallest.items()
    ]


def _met_by(fault: Fault) -> str:
    return f"{fault.what}: {fault.more}" if fault.more else fault.what


def _row(row: KnownFault, what: str) -> list[str]:
    version = ".".join(map(str, row.until or ()))
    mended = f"in jaxlib {version}" if version else "not yet"
    links = [f"[{link.rpartition('/')[2]}]({link})" for link in row.links]
    return [row.name, what, row.repair, mended, ", ".join(links) or "not known"]


def _program(row: KnownFault, name: str, smallest: Smallest) -> list[str]:
    case = case_of(smallest.program)
    outcome = smallest.outcome.value
    if not smallest.shardy or not smallest.gspmd:
        outcome += ", GSPMD only" if smallest.gspmd else ", Shardy only"
    what = f"`{case.use.expression}`: {_layout(case)}"
    return [f"`{name}`", row.name, what, outcome]


def _bytes(name: str, costs: Bytes) -> str:
    shardy, gspmd = (costs.get(f"{name}-{of.value}") for of in Partitioner)
    if None not in (shardy, gspmd) and shardy != gspmd:
        return f"{shardy}, GSPMD {gspmd}"
    return str(shardy if gspmd is None else gspmd)


def _layout(case: Case) -> str:
    """`x [8], i [2] split [X], the result [Y]; mesh (4, 2)`, all tensors float32."""
    pairs = zip(case.use.inputs.items(), case.arrives, case.annotated, strict=True)
    parts = [
        f"{name} {list(spec.shape)}{_split(annotated or arrives)}"
        for (name, spec), arrives, annotated in pairs
    ]
    results = zip(case.result, case.leaves, strict=True)
    parts += [f"the result{_split(name or leaves)}" for name, leaves in results]
    parts += [f"inside{_split(sharding)}" for sharding in case.inner]
    tensors = ", ".join(part for part in parts if part != "the result")
    shape = ", ".join(map(str, case.mesh.shape))
    region = f", manual along {', '.join(case.region)}" if case.region else ""
    return f"{tensors}; mesh ({shape}){region}"


def _split(sharding: Sharding) -> str:
    return f" `{sharding}`" if any(sharding.dims) else ""


def _measured(failures: Iterable[KnownFailure]) -> dict[str, int]:
    return {failure.name: measured(failure) for failure in failures}


if __name__ == "__main__":
    set_platform("cpu", 8)
    logging.set_verbosity(logging.ERROR)  # Each program warns of its repair.
    for of in OF:
        text = tables(of, _measured(OF_FAULTS) if of == "faults" else {})
        PAGE.write_text(_place(of).sub(lambda _, text=text: text, PAGE.read_text()))
    count = f"{len(FAULTS)} faults and {len(OF_FAULTS)} programs"
    print(f"Wrote {PAGE.relative_to(PAGE.parents[2])}: {count}")
