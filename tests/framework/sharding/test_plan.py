"""Sharding plans: Table 1 of GSPMD, and bad tables."""

import pathlib
import re

import gin
import pytest

from meshwright.framework.sharding.plan import NotingPlan, ShardingPlan

PLANS = pathlib.Path(__file__).parents[3] / "params" / "plans"
# GSPMD, Table 1: the seven annotated tensors of a layer.
WEIGHTS = {
    "w_q": ("model", "heads", "head_dim"),
    "w_o": ("heads", "head_dim", "model"),
    "w_in": ("model", "hidden"),
    "w_out": ("hidden", "model"),
}
ACTIVATIONS = {
    "BSM": ("batch", "sequence", "model"),
    "BSND": ("batch", "sequence", "heads", "head_dim"),
    "BSH": ("batch", "sequence", "hidden"),
}
TABLE_1 = {
    "attempt1": ["[_,_,X]", "[_,_,Y,_]", "[_,_,Y]"],
    "attempt2": ["[X,_,_]", "[X,_,Y,_]", "[X,_,Y]"],
    "finalized": ["[X,_,Y]", "[X,_,Y,_]", "[X,_,Y]"],
}


@pytest.mark.parametrize("name", TABLE_1)
def test_shipped_plans_are_those_of_table_1(name):
    gin.parse_config_file(PLANS / f"{name}.gin")
    gin.bind_parameter("MESH_SHAPE/gin.macro.value", (2, 4))
    try:
        plan = gin.get_configurable(ShardingPlan)()
    finally:
        gin.clear_config()
    weights = [str(plan.weight_sharding(dims)) for dims in WEIGHTS.values()]
    assert weights == ["[X,Y,_]", "[Y,_,X]", "[X,Y]", "[Y,X]"]
    activations = [str(plan.activation_sharding(dims)) for dims in ACTIVATIONS.values()]
    assert activations == TABLE_1[name]
    assert str(plan.mesh) == "X=2, Y=4"


def test_a_dim_may_be_split_by_several_axes_or_none():
    plan = ShardingPlan(
        mesh_shape=(2, 4),
        device_ids=range(7, -1, -1),
        weights={"vocab": ("X", "Y"), "model": None, "hidden": []},
    )
    sharding = plan.weight_sharding(["vocab", "model", "hidden", "other"])
    assert str(sharding) == "[X.Y,_,_,_]"
    assert sharding.mesh.device_ids == (7, 6, 5, 4, 3, 2, 1, 0)
    assert plan.activation_sharding(["vocab"]).is_replicated()
    assert ShardingPlan().mesh.size == 1


def test_weights_are_reduced_where_tokens_are_split():
    plan = ShardingPlan(
        mesh_axes=("data", "tensor"),
        weights={"hidden": "tensor"},
        activations={"batch": "data", "stream": "tensor"},
        unreduced_gradient_axes=("data", "tensor"),
    )
    assert str(plan.read_sharding(["model", "hidden"])) == "[_,tensor]{R:data}"
    assert str(plan.read_sharding(["model"])) == "[_]{R:data,tensor}"


def test_weights_are_read_whatever_splits_activations():
    """A plan may split by one axis dims that no activation has together."""
    both = {"batch": "X", "sequence": "X"}
    for partial in ((), ("X",)):
        plan = ShardingPlan(activations=both, unreduced_gradient_axes=partial)
        assert plan.read_sharding(["model"]).reduced == partial


@pytest.mark.parametrize("table", ["weights", "activations"])
def test_an_unknown_axis_names_the_nearest(table):
    message = (
        f"{table}['model'] names mesh axis 'modle', but the mesh has "
        "('data', 'model'); did you mean 'model'?"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        ShardingPlan(mesh_axes=("data", "model"), **{table: {"model": ["modle"]}})


def test_what_is_wrong_in_both_tables_is_said_at_once():
    message = (
        r"ShardingPlan.weights\['a'\] is 1; it (.|\n)*weights\['b'\] names mesh axis "
        r"'Z'(.|\n)*activations\['c'\] names mesh axis 'W'"
    )
    with pytest.raises(ValueError, match=message):
        ShardingPlan(weights={"a": 1, "b": "Z"}, activations={"c": "W"})


def test_an_axis_that_splits_a_tensor_twice_names_tensor_and_dims():
    plan = ShardingPlan(mesh_shape=(2, 4), weights={"model": "X", "hidden": ("Y", "X")})
    message = (
        "sharding plan for 'stack.w_in' (model->X, other->_, hidden->Y.X): mesh axis "
        "'X' is used twice in one tensor: on dim 0 and on dim 2"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.weight_sharding(("model", "other", "hidden"), "stack.w_in")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh_shape": 8}, r"mesh_shape is 8; it must be a sequence"),
        (
            {"weights": {"heads": 3}},
            r"ShardingPlan.weights\['heads'\] is 3; it must be a mesh axis, such as",
        ),
        (
            {"activations": {"heads": ["X", None]}},
            r"activations\['heads'\] is \['X', None\]; .* \('X', 'Y'\), or None",
        ),
        (
            {"mesh_shape": (2, 2), "device_ids": (1, 0)},
            r"ShardingPlan.device_ids has 2 devices, but ShardingPlan.mesh_shape = "
            r"\(2, 2\) has 4: bind ShardingPlan.device_ids = None",
        ),
    ],
)
def test_what_is_no_plan_is_refused_by_its_binding(fields, message):
    with pytest.raises(ValueError, match=message):
        ShardingPlan(**fields).mesh  # noqa: B018


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("modell", True),
        ("key_haeds", True),
        ("in_channels", False),
        ("channels", False),
        ("model_1", False),
        ("hidden2", False),
        ("query_heads", False),
    ],
)
def test_only_misspelt_words_of_names_are_told(name, is_told):
    names = ("model", "hidden1", "out_channels", "key_heads")
    plan = ShardingPlan(mesh_shape=(2, 4), weights=dict.fromkeys(names, "Y"))
    assert bool(NotingPlan.of(plan).misspelt({"w": (name,)})) == is_told
    table = ShardingPlan(mesh_shape=(2, 4), weights={name: "Y"})
    (entry,) = NotingPlan.of(table).unused({"w": names})
    assert entry.is_misspelt == is_told


@pytest.mark.parametrize(
    ("table", "near", "is_told"),
    [
        ({"embed": "X"}, "model", True),
        ({"joined_kv": "X"}, "heads", True),
        ({"kv": None}, "head_dim", True),
        ({"joined_kv": "X", "heads": "Y"}, "", False),
        ({"mlp": "X"}, "head_dim or heads or model", False),
    ],
)
def test_names_of_t5x_are_told_by_ours(table, near, is_told):
    plan = NotingPlan(mesh_shape=(2, 4), weights=table)
    weights = {"w": ("model", "heads", "head_dim")}
    (entry,) = plan.unused(weights)
    hint = f"; do you mean {near}?" if near else ""
    assert str(entry).endswith(f"no weight has{hint}")
    assert entry.is_misspelt == is_told
    if is_told:
        ((dim, axes),) = table.items()
        does = "has an entry for" if axes is None else "splits"
        message = (
            f"ShardingPlan.weights {does} dim {dim!r}, which .* Write {near!r}: "
            f"{axes!r} in place of {dim!r}: {axes!r}, for 'w'. Or .* add {near!r}: None"
        )
        with pytest.raises(ValueError, match=message):
            plan.check(weights)


def test_dims_without_a_name_are_no_misspelt_ones():
    """Of a batch, or of what a layer of one's own splits, they may be None."""
    plan = NotingPlan(mesh_shape=(2, 4), activations={"batch": "X", "hidden": "Y"})
    plan.activation_sharding(("batch", None, "hiddn"), "x")
    assert plan.noted == {"batch": "x", "hiddn": "x"}
    with pytest.raises(ValueError, match="do you mean hiddn?"):
        plan.check({})
