"""Where a ring of devices has tokens, and which pairs of blocks it computes."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.modeling.layer import Context
from meshwright.layers.attention.mask_rules import (
    MaskKind,
    NearMask,
    PrefixMask,
    Tokens,
    rule_of,
    visibility,
)
from meshwright.layers.attention.ring.ring_layout import Layout, RingSchedule

RULES = [
    *MaskKind,
    NearMask(left=9, right=0),
    NearMask(left=3, right=5),
    NearMask(left=None, right=2),
    PrefixMask(length=13),
]


def index_of(layout):
    """The index of each token [R, U * C] of a layout."""
    start = np.array([layout.start(device) for device in range(layout.devices)])
    return start[:, None] + layout.stride * np.arange(layout.part)


@pytest.mark.parametrize("in_stripes", [False, True])
@pytest.mark.parametrize(
    "length,devices,size", [(64, 4, 8), (37, 4, 4), (37, 2, None), (5, 4, 1)]
)
def test_tokens_are_where_they_are_said_to_be(length, devices, size, in_stripes):
    layout = Layout.of(length, devices, size, in_stripes=in_stripes)
    assert size is None or layout.size <= size
    x = tf.tile(1 + tf.range(length)[None], [2, 1])
    stack = layout.apply(Context(), x, 1, ("batch", "sequence"))
    assert stack.shape == [devices * layout.count, 2, layout.size]
    index = index_of(layout).reshape(-1, layout.size)
    want = np.where(index < length, 1 + index, 0)
    np.testing.assert_array_equal(stack, np.repeat(want[:, None], 2, axis=1))
    np.testing.assert_array_equal(
        layout.undo(Context(), stack, 1, ("batch", "sequence")), x
    )


def computed(schedule):
    """How often each pair of tokens is computed."""
    queries, keys = schedule.queries, schedule.keys
    counts = np.zeros([queries.length, keys.length], int)
    by_device = [
        [place.reshape(-1, layout.size) for place in index_of(layout)]
        for layout in (queries, keys)
    ]
    steps = [
        (run.first + n * run.goes, run.pairs)
        for run in schedule.runs
        for n in range(run.steps)
    ]
    for step, pairs in steps:
        rows = zip(pairs.rows, pairs.first, pairs.last, strict=True)
        for i, first, last in rows:
            for device, j in itertools.product(
                range(queries.devices), range(first, last + 1)
            ):
                query = by_device[0][device][i]
                key = by_device[1][(device - step) % queries.devices][j]
                ours, theirs = query < queries.length, key < keys.length
                counts[np.ix_(query[ours], key[theirs])] += 1
    return counts


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("length,devices,size", [(64, 4, 4), (37, 4, 4), (37, 2, 5)])
def test_each_pair_in_sight_is_computed_once(rule, length, devices, size):
    schedule = RingSchedule.of(length, length, devices, size, rule_of(rule))
    tokens = Tokens(index=tf.range(length)[None])
    visible = visibility(rule, tokens, tokens)
    visible = np.ones([length] * 2, bool) if visible is None else visible[0].numpy()
    counts = computed(schedule)
    assert counts.max() == 1
    assert counts[visible].min() == 1


def test_a_memory_of_another_length_is_seen_whole():
    counts = computed(RingSchedule.of(37, 50, 4, 5, rule_of(MaskKind.FULL)))
    np.testing.assert_array_equal(counts, np.ones([37, 50]))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_stripes_share_causal_work_evenly(devices):
    """Each device has the pairs that one would have on and below the diagonal."""
    blocks = 8
    schedule = RingSchedule.of(
        64 * devices, 64 * devices, devices, 8, rule_of(MaskKind.CAUSAL)
    )
    assert schedule.queries.in_stripes
    all_pairs = devices * 64**2
    assert schedule.pairs_of_tokens == all_pairs * (blocks + 1) // (2 * blocks)
    steps = [(run.steps, run.goes) for run in schedule.runs]
    assert steps == [(devices - 1, 1), (1, 0)]


def test_windows_reach_near_devices_only():
    schedule = RingSchedule.of(1024, 1024, 8, 16, NearMask(left=31, right=0))
    assert not schedule.queries.in_stripes
    assert [(run.first, run.goes) for run in schedule.runs] == [(0, 1), (1, 0)]
    assert schedule.back == 7
    # Three blocks for each of eight, the last two of which see the device before.
    assert schedule.pairs_of_tokens == 8 * 3 * 16**2
    both = RingSchedule.of(1024, 1024, 8, 16, NearMask(left=5, right=5))
    assert [(run.first, run.goes) for run in both.runs] == [(0, 1), (1, 6), (7, 0)]


def test_what_has_nothing_to_skip_is_not_striped():
    assert not RingSchedule.of(64, 64, 4, 4, rule_of(MaskKind.FULL)).queries.in_stripes
    # A device's tokens are one block.
    causal = RingSchedule.of(64, 64, 4, None, rule_of(MaskKind.CAUSAL))
    assert not causal.queries.in_stripes


def test_a_rule_that_hides_all_is_refused():
    class Blind(NearMask):
        def span(self, first, last):
            return 1, 0

    with pytest.raises(ValueError, match="hides all 64 keys.*correct span"):
        RingSchedule.of(64, 64, 4, 4, Blind())
