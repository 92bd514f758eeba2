"""Where axes come from: in small programs by hand, and in random ones by removal."""

import collections
import itertools
import pathlib

import pytest

from meshwright.framework.compiler.explaining.competitions import competitions
from meshwright.framework.compiler.explaining.provenance import Decided, OriginKind
from meshwright.framework.compiler.explaining.what_if import changed
from meshwright.framework.compiler.explaining.why import find
from meshwright.framework.compiler.lowering.sources import Kind
from meshwright.framework.compiler.stablehlo.shardy.meetings import meetings
from meshwright.framework.compiler.stablehlo.shardy.recorded import EDGE
from tests.framework.hlo.why.why_programs import PROGRAMS, RandomProgram, kept, lies
from tests.framework.partial.partial_programs import check_random

BORDERS = (OriginKind.ARGUMENT, OriginKind.RESULT)


def of(name, tensor):
    """The provenances of the only tensor of a name, by axis."""
    reasons = kept(name).reasons
    (found,) = (t for t in reasons.tensors if f"{t.kind.value} {t.name}" == tensor)
    with reasons.opened():
        return {p.axis: p for p in reasons.provenances(reasons.place(found))}


def way(provenance):
    return [(hop.direction.value, hop.op_name or hop.op) for hop in provenance.way]


def code(origin):
    """The line of code that an origin is at."""
    return pathlib.Path(origin.file).read_text().splitlines()[origin.line - 1].strip()


def test_an_axis_comes_through_loops_and_branches():
    """From the annotation in the body of a loop to the branch after it."""
    (found,) = of("looped", "inside cond/mul").values()
    assert (found.axis, found.dim) == ("X", 0)
    assert found.origin.kind is OriginKind.ANNOTATION
    assert found.origin.name == "while/XlaSharding"
    assert str(found.origin.sharding) == "[X,Y]"
    assert code(found.origin) == 'y = mw.mesh_split(x @ w, MESH, ["X", "Y"])'
    assert way(found)[:2] == [("back", "while/XlaSharding"), ("back", "while/matmul")]
    assert [hop.step for hop in found.way] == sorted({hop.step for hop in found.way})


def test_what_is_given_for_an_argument_is_its_own_origin():
    found = of("looped", "argument 0")
    assert set(found) == {"Y"} and not found["Y"].way
    assert found["Y"].origin.kind is OriginKind.ARGUMENT
    assert found["Y"].origin.sharding == lies(None, "Y")


def test_a_manual_region_is_an_origin_with_the_line_of_its_first_op():
    found = of("manual", "result result")["X"]
    assert found.origin.kind is OriginKind.REGION
    assert "tf.nn.relu(local)" in code(found.origin)
    assert way(found)[0] == ("forth", "Tanh")


def test_parts_of_axes_have_their_origin():
    found = of("in_parts", "inside Reshape")
    assert {axis.partition(":")[0] for axis in found} == {"Y"} and len(found) == 2
    assert {p.origin.name for p in found.values()} == {"XlaSharding"}


def test_of_two_annotations_the_one_that_came_first_won():
    reasons = kept("reshards").reasons
    (tensor,) = find(reasons, "Relu")
    with reasons.opened():
        (lost,) = competitions(reasons, reasons.place(tensor))
    # After the first annotation comes the op, and after the op the second.
    asks = {str(one.origin.sharding): one for one in (lost.winner, lost.loser)}
    assert set(asks) == {"[X,_]", "[_,X]"}
    assert (lost.axis, lost.winner.axis) == ("X", "X")
    assert {lost.dim, lost.winner.dim} == {0, 1}
    assert lost.decided is Decided.EARLIER


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_axis_has_an_origin_and_a_way_from_it(name):
    assert check_origins(kept(name).reasons) > 3


def check_origins(reasons) -> int:
    """Checks that axes come from the user, along ops that relate their dims."""
    axes = 0
    with reasons.opened():
        for tensor in reasons.tensors:
            place = reasons.place(tensor)
            for found in reasons.provenances(place):
                axes += 1
                assert found.origin.file or found.origin.kind in BORDERS
                assert entire(found.axis) in asked(found.origin)
                check_trail(reasons, place, found)
    return axes


def asked(origin) -> set[str]:
    return {entire(axis) for axes in origin.sharding.dims for axis in axes}


def entire(axis) -> str:
    return axis.partition(":")[0]


def check_trail(reasons, place, found) -> None:
    """Each tensor on the way is split by the axis, and met the next one at an op."""
    trail = reasons.trail(place, found.axis)
    assert len(trail) == len(found.way)
    places = [*(arrival.source for arrival in trail), place]
    for before, after in itertools.pairwise(places):
        met = [
            m for _, m in meetings(reasons.recorded, before) if after in places_of(m)
        ]
        assert related(reasons, found.axis, before, after, met)


def places_of(meeting):
    return [place for place, _ in meeting]


def related(reasons, axis, before, after, met) -> bool:
    """Whether an op relates a dim of each that the axis splits; or merges its dims."""
    for meeting in met:
        sides = [
            {
                factor
                for place, factors in meeting
                if place == one
                for factor, axes in zip(factors, dims(reasons, one), strict=True)
                if entire(axis) in map(entire, axes)
            }
            for one in (before, after)
        ]
        if sides[0] & sides[1] or None in sides[0] | sides[1]:
            return True
    return False


def dims(reasons, place):
    """With manual axes where a region begins, which are not seen inside."""
    sharding = reasons.sharding(place)
    if not sharding.manual or place.owner.name != EDGE:
        return sharding.dims
    border = reasons.recorded.at_region(place.owner.operands[0])
    return [a + b for a, b in zip(sharding.dims, border.dims, strict=True)]


def test_axes_of_random_programs_have_origins_which_removed_take_them_away():
    """Without its origin an axis is gone, or another that asks for it supplies it."""
    outcomes = collections.Counter()

    def check(random, _):
        program = RandomProgram(random)
        reasons = program.traced().reasons
        check_origins(reasons)
        outcomes.update(removed(reasons, random))

    check_random(check, 25, "")
    assert outcomes["gone"] > outcomes["supplied by another"]


def removed(reasons, random) -> collections.Counter:
    """What became of the axes of one origin without it."""
    origins = {p.origin: None for _, p in inferred(reasons)}
    if not origins:
        return collections.Counter()
    origin = random.choice(list(origins))
    kind = "inside" if origin.kind is OriginKind.ANNOTATION else origin.kind.value
    (tensor,) = (
        t for t in reasons.tensors if (t.kind, t.name) == (Kind(kind), origin.name)
    )
    without = changed(reasons, {reasons.spot(tensor): None})
    after = {(key, p.axis, p.dim): p.origin for key, p in inferred(without)}
    outcomes = collections.Counter()
    for key, one in inferred(reasons):
        if one.origin != origin:
            continue
        other = after.get((key, one.axis, one.dim))
        outcomes["gone" if other is None else "supplied by another"] += 1
        if other is not None:
            assert (other.kind, other.name) != (origin.kind, origin.name)
            assert entire(one.axis) in asked(other)
    return outcomes


def inferred(reasons):
    """The tensors' keys and the provenances of axes that came from elsewhere."""
    with reasons.opened():
        return [
            ((tensor.kind, tensor.name), found)
            for tensor in reasons.tensors
            for found in reasons.provenances(reasons.place(tensor))
            if found.way
        ]
