"""Mesh axes on the links of a torus."""

import numpy as np
import pytest

from meshwright.framework.devices.device_order import device_order, order_of
from meshwright.framework.devices.hardware import TPU_KINDS
from meshwright.framework.devices.topology import of_size, topology, topology_of
from meshwright.framework.devices.torus import (
    all_pairs,
    box_lines,
    link_load,
    longest_way,
    ring_hops,
    ring_load,
)
from meshwright.framework.sharding.mesh import DeviceMesh


def position(*coords):
    return np.array([coords])


@pytest.mark.parametrize("kind", TPU_KINDS.values(), ids=lambda kind: kind.name)
def test_published_peaks(kind):
    published = {
        "v2": 22.5,
        "v3": 61.5,
        "v4": 275,
        "v5e": 197,
        "v5p": 459,
        "v6e": 918,
        "tpu7x": 1153.5,
    }
    assert kind.peak_flops / 1e12 == pytest.approx(published[kind.name], rel=0.02)


def test_positions_are_numbered_row_by_row():
    torus = topology("v3:4x2")
    assert torus.size == 16 and torus.name == "v3:4x2"
    places = [tuple(p) for p in torus.positions]
    assert places[:3] == [(0, 0, 0), (0, 0, 1), (1, 0, 0)]
    assert places[8] == (0, 1, 0)
    assert len(set(places)) == 16


def test_ends_are_linked_in_whole_pods_and_cubes():
    assert topology("v3:32x16").wraps == (True, False)
    assert topology("v5e:16x8").wraps == (True, False)
    assert topology("v4:4x8x8").wraps == (True,) * 3
    assert topology("v4:2x4x4").wraps == (False,) * 3


def test_messages_take_the_short_way_round():
    open_, closed = topology("v3:8x2"), topology("v3:32x2")
    first, last = position(0, 0, 0), position(7, 0, 1)
    assert link_load(open_, first, last) == 1
    assert link_load(open_, first, position(0, 0, 1)) == 0  # On one chip.
    # All to one: of 32 in a closed row half come from each side.
    row = np.array([(x, 0, 0) for x in range(32)])
    to_one = np.zeros_like(row)
    assert link_load(closed, row, to_one) == 16
    assert link_load(open_, row[:8], to_one[:8]) == 7


def test_messages_meet_where_rows_and_columns_cross():
    torus = topology("v3:4x4")
    source = np.array([(0, 0, 0), (1, 0, 0), (2, 0, 0)])
    target = np.array([(3, 2, 0), (3, 1, 0), (3, 3, 0)])
    # x first: all three share the last link of the row, then go up one column.
    assert link_load(torus, source, target) == 3


def test_a_ring_uses_both_directions_and_a_line_comes_back():
    closed, open_ = topology("v3:32x2"), topology("v3:8x2")
    ring = np.array([[(x, 0, 0) for x in range(32)]])
    assert ring_load(closed, ring) == 1
    assert ring_load(open_, ring[:, :8]) == 2
    # Two rings over the two cores of each chip: the links carry twice as much, all in
    # one direction, whether or not the ends are linked.
    pair = np.concatenate([ring, ring + [0, 0, 1]])
    assert ring_load(closed, pair) == 4
    assert ring_load(open_, pair[:, :8]) == 4


def test_data_is_passed_half_way_round_or_all_the_way_where_rings_share_links():
    closed, open_ = topology("v3:32x2"), topology("v3:8x2")
    ring = np.array([[(x, 0, 0) for x in range(32)]])
    assert ring_hops(closed, ring) == 16
    # A line comes back by itself; there and back over both cores it has as many links.
    assert ring_hops(open_, ring[:, :8]) == 7
    back = np.concatenate([ring[:, :8], ring[:, 7::-1] + [0, 0, 1]], axis=1)
    assert ring_hops(open_, back) == 7
    pair = np.concatenate([ring, ring + [0, 0, 1]])
    assert ring_hops(closed, pair) == 31
    assert ring_hops(open_, pair[:, :8]) == 13
    # The cores of a chip need no link, and one device no other.
    chip = np.array([[(0, 0, 0), (0, 0, 1)]])
    assert ring_hops(open_, chip) == ring_hops(open_, chip[:, :1]) == 0


def test_the_lines_of_boxes():
    positions = topology("v5p:4x4x4").positions.reshape(4, 16, -1)
    lines = box_lines(positions[:, np.random.default_rng(0).permutation(16)])
    assert [along.shape for along in lines] == [(16, 4, 4)] * 2
    for along in lines:
        assert sorted(np.ptp(along, axis=1).tolist()) == [[0, 3, 0, 0]] * 16 or (
            sorted(np.ptp(along, axis=1).tolist()) == [[3, 0, 0, 0]] * 16
        )
    # A ring along a single dim, and chips that fill no box.
    assert box_lines(positions[:, :4]) is None
    assert box_lines(positions[:, [0, 1, 6, 7]]) is None


def test_the_longest_way():
    closed, open_ = topology("v3:32x2"), topology("v3:8x2")
    corners = position(0, 0, 0), position(7, 1, 1)
    assert longest_way(open_, *corners) == longest_way(closed, *corners) == 8
    assert longest_way(closed, position(0, 0, 0), position(31, 0, 0)) == 1
    row = np.array([[(x, 0, 0) for x in range(8)]])
    assert longest_way(open_, *all_pairs(row)) == 7


def test_all_to_all_fills_the_middle():
    torus = topology("v3:8x1")
    row = np.array([[(x, 0, 0) for x in range(8)]])
    assert link_load(torus, *all_pairs(row)) == 16  # Each of 4 to each of 4.
    assert link_load(topology("v5e:16x1"), *all_pairs(row)) == 16


# How the authors of GSPMD order the devices of slices, and whole pods: rings over rows
# of chips, forth on the first cores and back on the second ones; columns in zigzag.
@pytest.mark.parametrize(
    "name,shape,boxes,loads",
    [
        ("v3:4x8", (4, 16), ((4, 1, 1), (1, 8, 2)), (4, 2)),
        ("v3:4x8", (16, 4), ((1, 8, 2), (4, 1, 1)), (2, 4)),
        ("v3:8x16", (8, 32), ((8, 1, 1), (1, 16, 2)), (4, 2)),
        ("v3:8x16", (32, 8), ((1, 16, 2), (8, 1, 1)), (2, 4)),
        ("v3:32x32", (32, 64), ((1, 32, 1), (32, 1, 2)), (4, 1)),
        ("v3:32x32", (2048,), ((32, 32, 2),), (1,)),
        ("v3:8x16", (2, 16, 8), ((1, 1, 2), (1, 16, 1), (8, 1, 1)), (0, 4, 4)),
        ("v5e:16x16", (16, 16), ((1, 16, 1), (16, 1, 1)), (1, 1)),
        ("v5p:8x8x8", (8, 64), ((1, 1, 8, 1), (8, 8, 1, 1)), (1, 1)),
    ],
)
def test_axes_get_whole_dims(name, shape, boxes, loads):
    order = device_order(shape, topology(name))
    assert order.boxes == boxes
    assert order.loads == loads
    assert order.ids.shape == shape
    assert sorted(order.ids.flat) == list(range(order.topology.size))


@pytest.mark.parametrize("shape", [(8, 8, 4), (2, 2, 64), (4, 16, 4)])
def test_dims_are_cut_where_sizes_ask_for_it(shape):
    torus = topology("v3:8x16")
    order = device_order(shape, torus)
    assert sorted(order.ids.flat) == list(range(256))
    # What is said of the loads is what the order does.
    again = order_of(DeviceMesh(("a", "b", "c"), shape, order.ids.flatten()), torus)
    assert again.loads == order.loads


def test_a_ring_goes_forth_and_back_over_neighbours():
    order = device_order((4, 16), topology("v3:4x8"))
    steps = order.positions.reshape(4, 16, 3)[1]
    nexts = np.roll(steps, -1, axis=0)
    assert (np.abs(nexts - steps)[:, :2].sum(axis=1) <= 1).all()
    column = order.positions.reshape(4, 16, 3)[:, 0]
    assert [tuple(p) for p in column[:, :1]] == [(0,), (2,), (3,), (1,)]


def test_the_users_order_is_kept_and_priced():
    torus = topology("v3:4x8")
    ids = np.arange(64)[::-1]
    order = order_of(DeviceMesh(("X", "Y"), (4, 16), ids), torus)
    assert (order.ids.flatten() == ids).all()
    assert order.boxes is None
    # Rows of 4 chips: an axis of 16 cores takes two of them and jumps back between.
    assert order.loads[1] >= device_order((4, 16), torus).loads[1]


def test_a_mesh_of_another_size_is_an_error():
    with pytest.raises(ValueError, match=r"shape \(4, 4\) has 16 devices, .*has 64"):
        device_order((4, 4), topology("v3:4x8"))


def test_topologies_of_a_size():
    assert [torus.name for torus in of_size(2048)][0] == "v3:32x32"
    assert all(torus.size == 64 for torus in of_size(64))
    assert of_size(7) == []


class FakeDevice:
    def __init__(self, kind, coords, core):
        self.device_kind, self.coords, self.core_on_chip = kind, coords, core


def test_devices_that_fill_a_box_have_a_topology():
    box = [
        FakeDevice("TPU v3", (x, y, 0), c)
        for x in range(2)
        for y in range(4)
        for c in (0, 1)
    ]
    assert topology_of(box) == topology("v3:2x4")
    assert topology_of(box[:-1]) is None
    assert topology_of([FakeDevice("cpu", (0, 0, 0), 0)]) is None
