"""Nested maps: paths, order, mapping, and what they refuse."""

import copy
import pickle

import pytest
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap


@pytest.fixture
def tree():
    return NestedMap(b=NestedMap(z=1, a={"w": 2}), a=3, c=NestedMap())


def test_an_entry_is_set_by_its_path():
    nested = NestedMap(a=NestedMap(b=1))
    nested.set_path("a.c.d", 2)
    nested.set_path("e", 3)
    assert nested == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert nested.get_path("a.c.d") == 2


def test_entries_are_attributes_and_mappings_become_nested_maps(tree):
    assert tree.b.a.w == tree["b"]["a"]["w"] == tree.get_path("b.a.w") == 2
    tree.b.a.w = 5
    tree.d = {"e": 6}
    tree["f"] = {"g": {}}
    assert tree.b["a"]["w"] == 5
    assert isinstance(tree.d, NestedMap) and isinstance(tree.f.g, NestedMap)


def test_a_missing_entry_names_those_there_are(tree):
    with pytest.raises(AttributeError, match=r"no entry 'x'; it has \['a', 'b', 'c'\]"):
        _ = tree.x
    with pytest.raises(KeyError, match="'x'"):
        tree.get_path("b.x")
    assert not hasattr(tree, "x")


@pytest.mark.parametrize("key", ["a.b", "1", "", 1, None])
def test_keys_are_identifiers(key):
    with pytest.raises(ValueError, match=r"NestedMap key .* is not an identifier"):
        NestedMap({key: 1})
    with pytest.raises(ValueError, match=r"NestedMap key .* is not an identifier"):
        NestedMap()[key] = 1


@pytest.mark.parametrize("key", ["items", "leaves"])
def test_keys_do_not_hide_behind_methods(key):
    with pytest.raises(ValueError, match=f"key '{key}' is the name of a method"):
        NestedMap({key: 1})


def test_leaves_come_by_sorted_path_as_tf_nest_has_them(tree):
    assert list(tree.items_by_path()) == [("a", 3), ("b.a.w", 2), ("b.z", 1)]
    assert tree.leaves() == tf.nest.flatten(tree) == [3, 2, 1]
    doubled = tf.nest.map_structure(lambda x: 2 * x, tree)
    assert doubled == {"a": 6, "b": {"a": {"w": 4}, "z": 2}, "c": {}}
    assert isinstance(doubled.b.a, NestedMap)


def test_map_goes_leaf_by_leaf(tree):
    other = tree.map(lambda x: 10 * x)
    assert isinstance(other.b.a, NestedMap)
    paths = tree.map_with_path(lambda path, x, y: (path, x + y), other)
    assert paths.leaves() == [("a", 33), ("b.a.w", 22), ("b.z", 11)]
    assert paths.c == {}


def test_maps_of_other_structure_are_refused(tree):
    other = NestedMap(a=0, b=NestedMap(z=0, a=NestedMap(v=0)), c=NestedMap())
    with pytest.raises(ValueError, match=r"differ at 'b\.a': \['w'\] against \['v'\]"):
        tree.map(lambda x, y: x, other)
    with pytest.raises(ValueError, match="differ at 'the root'"):
        tree.map(lambda x, y: x, NestedMap())


def test_pack_is_the_inverse_of_leaves(tree):
    packed = tree.pack(iter("xyz"))
    assert packed.leaves() == ["x", "y", "z"] and packed.b.a.w == "y"
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"{count} leaves for a structure of 3"):
            tree.pack(range(count))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))]
)
def test_copies_share_nothing(tree, duplicate):
    other = duplicate(tree)
    assert other == tree and isinstance(other.b.a, NestedMap)
    other.b.a.w = 7
    assert tree.b.a.w == 2
