"""Device meshes: a description of devices, and bad ones."""

import re

import numpy as np
import pytest

from meshwright.framework.sharding.mesh import DeviceMesh


def test_describes_a_grid_of_devices():
    mesh = DeviceMesh(("X", "Y"), (2, 4))
    assert mesh.size == 8
    np.testing.assert_array_equal(mesh.ids, np.arange(8).reshape(2, 4))
    assert mesh.axis_size("Y") == 4
    assert mesh.axes_size(("Y", "X")) == 8 and mesh.axes_size(()) == 1
    assert str(mesh) == "X=2, Y=4"


def test_devices_may_come_in_any_order():
    ids = [[5, 4], [1, 0], [3, 2]]
    mesh = DeviceMesh(["X", "Y"], [3, 2], ids)
    np.testing.assert_array_equal(mesh.ids, ids)
    # Lists and arrays are as good as tuples: meshes are keys of caches.
    assert mesh == DeviceMesh(("X", "Y"), (3, 2), np.array(ids))
    assert hash(mesh) == hash(DeviceMesh(("X", "Y"), (3, 2), (5, 4, 1, 0, 3, 2)))
    assert mesh != DeviceMesh(("X", "Y"), (3, 2))
    assert DeviceMesh(("X",), (3,), [0, 1, 2]) == DeviceMesh(("X",), (3,))


def test_a_mesh_larger_than_any_machine_is_only_a_description():
    assert DeviceMesh(("X", "Y"), (32, 64)).size == 2048


def test_places_along_axes_and_parts():
    mesh = DeviceMesh(("X", "Y"), (2, 6), range(11, -1, -1))
    for axis, stride, first_row in [
        ("X", 6, [0, 0, 0, 0, 0, 0]),
        ("Y", 1, [0, 1, 2, 3, 4, 5]),
        ("Y:(1)2", 3, [0, 0, 0, 1, 1, 1]),
        ("Y:(2)3", 1, [0, 1, 2, 0, 1, 2]),
        ("Y:(1)3", 2, [0, 0, 1, 1, 2, 2]),
    ]:
        assert mesh.stride(axis) == stride
        assert mesh.place_along(axis)[0].tolist() == first_row
        assert mesh.name(mesh.part(axis)) == axis
    assert mesh.name(mesh.part("Y:(1)6")) == "Y"
    assert mesh.place_along("X")[1].tolist() == [1] * 6


@pytest.mark.parametrize(
    "args,message",
    [
        ((("X",), (2, 4)), "names 1 axes ('X',) but its shape (2, 4) has 2"),
        ((("X", "X"), (2, 4)), "axis names repeat: ('X', 'X')"),
        ((("X", "Y"), (2, 0)), "shape (2, 0) must be positive"),
        ((("X", "Y"), (2, -1)), "shape (2, -1) must be positive"),
        ((("X",), (2,), (0, 1, 2)), "needs 2 distinct device ids, got 3 ids"),
        ((("X",), (2,), (1, 1)), "got 2 ids, 1 distinct"),
    ],
)
def test_a_bad_mesh_is_refused(args, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DeviceMesh(*args)


@pytest.mark.parametrize(
    "args,message",
    [
        (((2, 4), ("data", "model")), "the names come first, as in DeviceMesh"),
        (((2,), (4,)), "axis_names of a device mesh is (2,); pass a tuple of names"),
        (
            ("X", 8),
            "axis_names of a device mesh is 'X'; pass a tuple of names, such as",
        ),
        (
            (("X",), 8),
            "shape of a device mesh is 8; pass a tuple of ints, such as (8,)",
        ),
        ((("X",), np.int64(8)), "pass a tuple of ints, such as (8,)"),
        ((("X",), (8.0,)), "shape of a device mesh is (8.0,); pass a tuple of ints"),
        ((("X",), (2,), (0.0, 1.0)), "device_ids of a device mesh is (0.0, 1.0); pass"),
    ],
)
def test_a_mesh_of_other_types_is_refused(args, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        DeviceMesh(*args)


def test_an_unknown_axis_names_those_there_are():
    mesh = DeviceMesh(("data", "model"), (2, 4))
    with pytest.raises(ValueError, match=r"'modle': the mesh has \('data', 'model'\)"):
        mesh.axis_size("modle")
    with pytest.raises(ValueError, match="unknown mesh axis 'modle'"):
        mesh.axes_size(("data", "modle"))


@pytest.mark.parametrize("name", ["", "_", "x.y", "x,y", "x?", "x:(1)2", "x y"])
def test_an_axis_name_that_no_text_could_tell_is_refused(name):
    with pytest.raises(ValueError, match="a name is of letters, digits, - and _"):
        DeviceMesh((name,), (2,))
