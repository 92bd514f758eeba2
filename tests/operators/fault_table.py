"""The tables of docs/operators.md that show the table of faults; run, it rewrites them.

python -m tests.operators.fault_table
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Mapping

from meshwright.framework import set_platform
from meshwright.framework.compiler.repair.table.fault import Fault, Smallest
from meshwright.framework.compiler.repair.table.faults import FAULTS
from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.sharding.sharding import Sharding
from tests.operators.judging.cases import Case, compiled
from tests.operators.judging.printed import case_of
from tests.operators.known_failures import KNOWN_FAILURES, KnownFailure

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "operators.md"
_TABLES = re.compile(
    r"(?<=<!-- the table of faults -->\n).*?(?=<!-- its end -->)", re.S
)
Bytes = Mapping[str, int]
"""What repairs send to each device, by a known failure's name."""


def on_page() -> str:
    """The tables as the page has them."""
    return _TABLES.search(PAGE.read_text())[0]


def bytes_on_page() -> dict[str, int]:
    """What the page says of each known failure."""
    cells = re.findall(r"^\| `(\w+)` \|.*\| ([\w, ]+) \|$", on_page(), re.MULTILINE)
    costs = {}
    for name, cell in cells:
        shardy, _, other = cell.partition(", GSPMD ")
        costs[f"{name}-{Partitioner.SHARDY.value}"] = int(shardy)
        costs[f"{name}-{Partitioner.GSPMD.value}"] = int(other or shardy)
    return {f.name: costs[f.name] for f in KNOWN_FAILURES if f.name in costs}


def measured(failure: KnownFailure) -> int:
    """The bytes of all repairs of the program, and of its gradients."""
    program = compiled([failure.case], failure.partitioner, [failure.case.use.values])
    return sum(repair.bytes for repair in program.repairs)


def tables(costs: Bytes) -> str:
    """The tables as the page is to have them."""
    faults = [
        "| fault | an op meets it that | layout instead | mended | reported |",
        "|---|---|---|---|---|",
        *map(_fault, FAULTS),
    ]
    programs = [
        "| program | meets | what it computes, how split | left to XLA | bytes |",
        "|---|---|---|---|---|",
        *(
            _program(fault, name, smallest, costs)
            for fault in FAULTS
            for name, smallest in fault.smallest.items()
        ),
    ]
    return "\n".join(["", *faults, "", *programs, "", ""])


def _fault(fault: Fault) -> str:
    version = ".".join(map(str, fault.until or ()))
    mended = f"in jaxlib {version}" if version else "not yet"
    links = [f"[{link.rpartition('/')[2]}]({link})" for link in fault.links]
    known = ", ".join(links) or "not known"
    what = f"{fault.what}: {fault.more}" if fault.more else fault.what
    return f"| {fault.name} | {what} | {fault.repair} | {mended} | {known} |"


def _program(fault: Fault, name: str, smallest: Smallest, costs: Bytes) -> str:
    case = case_of(smallest.program)
    outcome = smallest.outcome.value
    if not smallest.shardy or not smallest.gspmd:
        outcome += ", GSPMD only" if smallest.gspmd else ", Shardy only"
    both = [costs.get(f"{name}-{partitioner.value}") for partitioner in Partitioner]
    shardy, gspmd = both
    cell = str(shardy if gspmd is None else gspmd)
    if None not in both and shardy != gspmd:
        cell = f"{shardy}, GSPMD {gspmd}"
    return (
        f"| `{name}` | {fault.name} | `{case.use.expression}`: {_layout(case)} | "
        f"{outcome} | {cell} |"
    )


def _layout(case: Case) -> str:
    """`x [8], i [2] split [X], the result [Y]; mesh (4, 2)`, all tensors float32."""
    pairs = zip(case.use.inputs.items(), case.arrives, case.annotated, strict=True)
    parts = [
        f"{name} {list(spec.shape)}{_split(annotated or arrives)}"
        for (name, spec), arrives, annotated in pairs
    ]
    results = zip(case.result, case.leaves, strict=True)
    parts += [f"the result{_split(name or leaves)}" for name, leaves in results]
    shape = ", ".join(map(str, case.mesh.shape))
    return f"{', '.join(p for p in parts if p != 'the result')}; mesh ({shape})"


def _split(sharding: Sharding) -> str:
    return f" `{sharding}`" if any(sharding.dims) else ""


def _measured(failures: Iterable[KnownFailure]) -> dict[str, int]:
    return {failure.name: measured(failure) for failure in failures}


if __name__ == "__main__":
    set_platform("cpu", 8)
    text = tables(_measured(KNOWN_FAILURES))
    PAGE.write_text(_TABLES.sub(lambda _: text, PAGE.read_text()))
