"""Gin files are found, bindings are checked, errors name what is wrong."""

import dataclasses
import enum
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gin
import pytest
import tensorflow as tf

from meshwright.trainers.experiment import config


@gin.constants_from_enum
class Kind(enum.Enum):
    """Gin users write `%Kind.CAUSAL`."""

    FULL = "full"
    CAUSAL = "causal"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """A leaf with one value that must be set."""

    width: int
    depth: int = 1
    kind: Kind = Kind.FULL
    dtype: tf.DType = tf.float32


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    """Holds other configurables."""

    first: object
    second: Inner | None = None
    name: str = "outer"


@gin.register(module="elsewhere.one")
@dataclasses.dataclass(frozen=True)
class Twin:
    """Shares its name with a class of another module."""

    size: int = 0


@gin.register
@dataclasses.dataclass(frozen=True)
class Items:
    """Expects a dict, and does not say so."""

    of: object

    def __post_init__(self):
        self.of.items()


gin.register("elsewhere.two.Twin")(dataclasses.make_dataclass("Twin", ["size"]))


@pytest.fixture(autouse=True)
def _clear():
    yield
    gin.clear_config()


@pytest.fixture
def params(tmp_path, monkeypatch):
    """A folder of shipped files, and another working directory."""
    shipped, cwd = tmp_path / "params", tmp_path / "cwd"
    (shipped / "lm").mkdir(parents=True)
    cwd.mkdir()
    (shipped / "lm" / "base.gin").write_text("Inner.width = 4\nInner.depth = 2\n")
    (shipped / "lm" / "big.gin").write_text(
        "include 'lm/base.gin'\nInner.width = 64\nOuter.first = @Inner()\n"
    )
    monkeypatch.setattr(config, "PARAMS", shipped)
    monkeypatch.chdir(cwd)
    return shipped


def build(*lines):
    config.load([], lines)
    return gin.get_configurable(Outer)()


@pytest.mark.parametrize("name", ["lm/big.gin", "lm/big"])
def test_file_found_under_params(params, name):
    assert config.find_gin_file(name) == params / "lm" / "big.gin"


def test_file_of_the_working_directory_wins(params, tmp_path):
    mine = tmp_path / "cwd" / "lm" / "big.gin"
    mine.parent.mkdir()
    mine.write_text("Inner.width = 1\n")
    assert config.find_gin_file("lm/big").resolve() == mine
    assert config.find_gin_file(str(params / "lm" / "big")) == params / "lm" / "big.gin"


def test_shipped_files_lie_beside_the_package():
    assert config.PARAMS.is_dir()


def test_unknown_file_names_the_nearest(params):
    with pytest.raises(config.ConfigError, match=r"'lm/bgi'.*\n.*mean lm/big.gin"):
        config.find_gin_file("lm/bgi")


def test_load_follows_includes_and_params_override(params):
    config.load(["lm/big"], ["Inner.depth = 3"])
    outer = gin.get_configurable(Outer)()
    assert outer == Outer(first=Inner(width=64, depth=3))
    config.check_all_operative()


def test_load_forgets_what_was_loaded_before():
    build("Outer.first = @Inner()", "Inner.width = 1", "Inner.depth = 9")
    assert build("Outer.first = @Inner()", "Inner.width = 1").first.depth == 1


def test_scopes_macros_enums_and_dtypes():
    outer = build(
        "WIDTH = 8",
        "Outer.first = @Inner()",
        "Outer.second = @cross/Inner()",
        "Inner.width = %WIDTH",
        "cross/Inner.kind = %Kind.CAUSAL",
        "cross/Inner.dtype = %bfloat16",
    )
    assert outer.first == Inner(width=8)
    assert outer.second == Inner(width=8, kind=Kind.CAUSAL, dtype=tf.bfloat16)
    config.check_all_operative()
    text = config.operative_text()
    assert "Inner.width = %WIDTH" in text
    assert "Outer.name = 'outer'" in text
    # What was in effect can be loaded again.
    config.load([], [text])
    assert gin.get_configurable(Outer)() == outer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Iner.width = 1", r"'Iner'.*\n.*line 1\n.*Iner.width = 1\n.*mean Inner\?"),
        ("Inner.widht = 1", r"'Inner'.*'widht'.*\n.*line 1\n.*\n.*mean width\?"),
        ("Outer.first = @Iner()", r"@Iner\(\).*\n.*line 1\n.*\n.*\n.*mean Inner\?"),
        ("x/Outer.first = @a/b/Iner()", r"mean Inner\?"),
        ("Twin.size = 1", r"Ambiguous selector 'Twin'.*elsewhere.one.Twin"),
        ("Inner.width = %WIDTH", r"no macro.*%WIDTH.*\n.*Inner.width = %WIDTH"),
        ("WITDH = 1\nInner.width = %WIDTH", r"%WIDTH.*\n.*\n.*mean %WITDH\?"),
        ("Inner.kind = %Kind.CASUAL", r"%Kind.CASUAL.*\n.*\n.*mean %Kind.CAUSAL"),
        (
            "Inner.dtype = %DType.FLOAT17",
            r"%DType.FLOAT17.*\n.*\n  It must be %float32, %bfloat16 or %float16\.",
        ),
        (
            "Outer.name = /data",
            r"Unable to parse value: quote a string or a path, as in",
        ),
        ("Outer.name = 8b", r"Expected newline after the value: quote a string, as in"),
        (
            "Outer.first = @Classify()",
            r"If Classify is a class of yours, the gin file must import the module "
            r"that registers it:\n    import my_package.my_task\n  or .*"
            r"--import=my_package.my_task, which",
        ),
        (
            "Outer.first = @my_pairs.train",
            r"If my_pairs.train is .* of yours, the gin file must import the module",
        ),
        (
            "import no.such.module",
            r"installed or in a folder of PYTHONPATH,\n  which .*/cwd is not: set "
            "PYTHONPATH=.",
        ),
        ("Inner.width = %gin.REQUIRED", r"Inner.width.*REQUIRED.*not.*overridden"),
        ("Inner.width = [1,", "EOF in multi-line statement"),
        ("Inner.width = 'a", r"gin parameters: .*\n  In line 1\n    Inner.width = 'a"),
        ("Inner width", r"expected ':' or '=': write NAME=VALUE, as in "),
        ("Inner.width", r"NAME=VALUE.*\n  In line 1\n    Inner.width$"),
        ("Inner:\n    width = 1\n  depth = 2", "unindent does not match"),
        ("import no.such.module", r"No module named 'no'.*\n.*line 1"),
        (
            "import os",
            "`import os` is for modules that register.*\n.*line 1\n.*import os",
        ),
        ("from os import path as p", "`from os import path as p` is for modules"),
        (
            "from __gin__ import dynamic_registration",
            "let a gin file call any function",
        ),
        ("include 'lm/bgi.gin'", r"'lm/bgi.gin'.*\n.*mean lm/big.gin.*\n.*line 1"),
    ],
)
def test_bad_binding_is_explained(params, line, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load([], [line])


def test_an_unknown_macro_names_what_uses_it_and_nothing_else():
    lines = ["WIDTH = 1", "Inner.depth = %WIDTH", "Inner.width = %WIDT", "DEWS = 2"]
    with pytest.raises(config.ConfigError) as error:
        config.load([], lines)
    listed = str(error.value).splitlines()[1:]
    assert listed == ["    Inner.width = %WIDT", "  Did you mean %WIDTH?"]


def test_all_macros_that_are_missing_are_named_at_once():
    with pytest.raises(config.ConfigError, match="Missing too: %B, %C\\."):
        config.load([], ["Inner.width = %A", "Inner.depth = %B", "Outer.name = %C"])


def test_an_unknown_class_is_refused_with_those_that_fit():
    message = "Experiment.optimizer takes Adafactor, Adam, .*SGD"
    with pytest.raises(config.ConfigError, match=message):
        config.load([], ["Experiment.optimizer = @Sofia()"])
    with pytest.raises(config.ConfigError, match="If Sofia is a class of yours"):
        config.load([], ["SpeechInput.vocabulary = @Sofia()"])  # Of any class.


@pytest.mark.parametrize(
    ("bound", "theirs", "ours"),
    [
        ("Adafactor.decay_rate = 0.8", "decay_rate", "decay_exponent"),
        ("transformer_layer.mlp_dim = 8", "mlp_dim", "hidden_dims"),
    ],
)
def test_a_parameter_by_its_name_in_t5x_is_refused_with_that_of_here(
    bound, theirs, ours
):
    message = f"(?s)named '{theirs}'.*T5X's {theirs} is '{ours}' here"
    with pytest.raises(config.ConfigError, match=message):
        config.load([], [bound])


def test_a_parameter_by_an_old_name_is_refused_with_its_new_one():
    message = r"(?s)parameter .*'partial_axes'.*It is called 'unreduced_gradient_axes'"
    with pytest.raises(config.ConfigError, match=message):
        config.load([], ["ShardingPlan.partial_axes = ('data',)"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nInner.widht = 1\n", r'mine.gin", line 2\n    Inner.widht = 1\n.*width'),
        ("\n\nInner.width = ]\n", r"mine.gin: Unable to parse.*\n  In line 3\n"),
        ("Inner.width = (1,\n", "gin file mine: .*EOF in multi-line"),
        ("include 'mine'\n", "gin file mine: .*recursion"),
    ],
)
def test_bad_file_is_named_with_its_line(params, tmp_path, text, message):
    (tmp_path / "cwd" / "mine.gin").write_text(text)
    with pytest.raises(config.ConfigError, match=message):
        config.load(["mine"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("one.Twin.size = 3", r"one.Twin.size = 3\n.*gin built no one.Twin: refer to"),
        ("DEPTH = 3", r"DEPTH = 3\n.*nothing in use refers to %DEPTH"),
        ("WIDHT = 3", r"refers to %WIDHT\n  Did you mean %WIDTH\?"),
        ("MOST = 3\none.Twin.size = %MOST", r"2 gin.*%MOST, only one.Twin.size, which"),
        ("corss/Inner.depth = 3", r"in scope 'corss'.*\n.*mean cross\?"),
        ("cross/x/Inner.depth = 3", "in scope 'cross/x'"),
        ("Outer.name = 'given'", r"Outer.name = 'given'\n.*got its name from code"),
        ("Inner.kind = %Kind.FULL", r"Inner.kind.*\n.*got its kind from .*inner scope"),
    ],
)
def test_binding_without_effect_is_an_error(line, message):
    lines = [
        "Outer.first = @cross/Inner()",
        "WIDTH = 1",
        "Inner.width = %WIDTH",
        "cross/Inner.kind = %Kind.CAUSAL",
    ]
    with pytest.raises(config.ConfigError, match=rf"(?s){message}"):
        config.load([], [*lines, line])
        gin.get_configurable(Outer)(name="from code")
        config.check_all_operative()


def test_a_mesh_without_a_plan_is_told_to_include_one():
    config.load([], ["MESH_SHAPE = (4, 2)"])
    message = (
        r"MESH_SHAPE = \(4, 2\)\n.*no plan .*uses one device: include .*"
        r"--gin_file=plans/data_tensor.gin\n +plans/ has .*ring.gin, .*spatial_2d.gin"
    )
    with pytest.raises(config.ConfigError, match=message):
        config.check_all_referred("Outer")
    config.load([], ["MESH_SHAPE = (4, 2)", "ShardingPlan.mesh_shape = (2, 4)"])
    with pytest.raises(config.ConfigError, match=r"\(2, 4\)` does not refer to it: ch"):
        config.check_all_operative()


def test_errors_of_the_classes_themselves_pass_through():
    with pytest.raises(TypeError, match=r"(?s)'width'.*configurable 'Inner'"):
        build("Outer.first = @Inner()")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Outer.first = @Inner()"], r"Inner.width must .*--gin_param='Inner.width ="),
        (["Outer.first = @x/Inner()", "Inner.depth = 2"], "Inner.width must be set"),
        ([], "Outer.first must be set: bind it in a gin file"),
    ],
)
def test_missing_parameter_is_named(lines, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load([], lines)
        config.build(Outer)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["A = %A", "Outer.name = %A"], "%A refers to itself"),
        (["A = [%B]", "B = {1: %A}", "Outer.name = %A"], "%[AB] refers to itself"),
        (["Outer.second = @Outer()"], r"@Outer\(\) refers to itself"),
        (
            [f"A{i} = [%A{i + 1}, %A{i + 1}]" for i in range(30)]
            + ["A30 = 1", "Outer.name = %A0"],
            r"more than 10000 references are followed, the last to %A\d+",
        ),
    ],
)
def test_references_without_end(lines, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load([], lines)
        config.build(Outer)


def test_files_without_end(params, tmp_path):
    for i in range(20):
        both = f"include 'f{i + 1}.gin'\n" * 2
        (tmp_path / "cwd" / f"f{i}.gin").write_text(both)
    (tmp_path / "cwd" / "f20.gin").write_text("")
    with pytest.raises(config.ConfigError, match="more than 1000 gin files"):
        config.load(["f0"])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"Inner.width = \xe9\n", b"\0"])
def test_what_is_no_gin_text_is_named(params, tmp_path, content):
    (tmp_path / "cwd" / "mine.gin").write_bytes(content)
    with pytest.raises(config.ConfigError, match="mine"):
        config.load(["mine"])


def test_what_a_class_runs_into_is_told():
    with pytest.raises(
        config.ConfigError, match=r"no attribute 'items'\n  @Items\(\) was b"
    ):
        config.load([], ["Outer.first = @Items()", "Items.of = 3"])
        config.build(Outer)


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Typed:
    """Fields of all types; what it computes of some needs these."""

    count: int = 2
    rate: float = 0.5
    name: str | None = None
    flag: bool = False
    sizes: Sequence[int] = ()
    table: Mapping[str, str] = dataclasses.field(default_factory=dict)
    root: pathlib.Path = pathlib.Path()
    kind: Kind = Kind.FULL
    how: Literal["fast", "slow"] = "fast"
    inner: Inner | None = None
    call: Callable[[], Inner] | None = None
    unlike: str = 3
    anything: Any = None

    def __post_init__(self):
        range(self.count)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("count = 'two'", "count is 'two'; it must be a whole number, such as 2"),
        ("count = 2.0", "count is 2.0; it must be a whole number"),
        ("count = True", "count is True; it must be a whole number"),
        ("rate = '1'", "rate is '1'; it must be a number, such as 0.1"),
        ("name = 3", "name is 3; it must be a string in quotes, such as 'abc' or None"),
        ("flag = 1", "flag is 1; it must be True or False"),
        ("sizes = 3", r"sizes is 3; it must be a sequence, such as \(2, 4\)"),
        ("sizes = '34'", "sizes is '34'; it must be a sequence"),
        ("table = 3", "table is 3; it must be a dictionary, such as"),
        ("root = 3", "root is 3; it must be a path in quotes"),
        ("kind = 'full'", "kind is 'full'; it must be %Kind.FULL or %Kind.CAUSAL"),
        ("how = 'fsat'", "how is 'fsat'; it must be 'fast' or 'slow'"),
        (
            "inner = @Inner",
            r"inner is .*; it must be of class Inner, .*: write @Inner\(\)",
        ),
        ("call = 3", "call is 3; it must be a function, such as @name or None"),
    ],
)
def test_a_value_of_another_type_is_named(line, message):
    config.load([], [f"Typed.{line}"])
    with pytest.raises(config.ConfigError, match=f"Typed.{message}") as error:
        config.build(Typed)
    assert "\n  It is bound by `" in str(error.value)


def test_values_of_the_right_types_pass():
    lines = [
        "WIDTH = 3",
        "Outer.first = @Inner()",
        "Inner.width = %WIDTH",
        "Outer.second = @x/Inner()",
        "x/Inner.dtype = %bfloat16",
        "x/Inner.kind = %Kind.CAUSAL",
    ]
    config.load([], lines)
    assert config.build(Outer).second.kind is Kind.CAUSAL
    values = [
        "rate = 1",
        "sizes = [1]",
        "root = '/data'",
        "call = @Inner",
        "name = 'a'",
    ]
    values += ["inner = @Inner()", "how = 'slow'", "table = {'a': 'b'}", "anything = 3"]
    config.load([], [*(f"Typed.{value}" for value in values), "Inner.width = 1"])
    assert config.build(Typed).inner == Inner(width=1)


def test_bindings_of_a_replaced_class_are_set_aside(params, tmp_path):
    (tmp_path / "cwd" / "mine.gin").write_text(
        "DEPTH = 3\ninclude 'lm/big'\nInner.depth = %DEPTH\nOuter.first = @one.Twin()\n"
    )
    config.load(["mine"])
    assert config.build(Outer).first == Twin()
    assert config.check_all_operative() == ["Inner.depth"]  # Macros may serve others.
    # What is bound when the class is out of use, or comes back into it, must work.
    config.load(["mine"], ["Inner.depth = 5"])
    config.build(Outer)
    with pytest.raises(config.ConfigError, match="1 gin.*\n.*Inner.depth = 5\n"):
        config.check_all_operative()
    config.load(["mine"], ["Outer.first = @Inner()", "Inner.depth = 5"])
    assert config.build(Outer).first == Inner(width=64, depth=5)
    assert config.check_all_operative() == []  # Macros may serve others.
    config.load(["lm/big"], ["Inner.depth = 5", "Outer.first = @one.Twin()"])
    config.build(Outer)
    assert config.check_all_operative() == ["Inner.depth"]


def test_a_file_read_again_sets_no_reference_back(params, tmp_path):
    """Adding a shipped file after own lines must not change what these refer to."""
    mine, added = tmp_path / "cwd" / "mine.gin", tmp_path / "cwd" / "added.gin"
    mine.write_text("include 'lm/big'\nInner.width = 5\nOuter.first = @one.Twin()\n")
    added.write_text("include 'mine'\n\ninclude 'lm/big'\n")
    with pytest.raises(config.ConfigError) as error:
        config.load(["added"])
    assert "`Outer.first = @one.Twin()` (mine.gin:3) is replaced by" in str(error.value)
    assert "lm/big.gin:3, which `include 'lm/big'` (added.gin:3)" in str(error.value)
    added.write_text(added.read_text() + "Outer.first = @one.Twin()\n")
    config.load(["added"])
    assert any(
        "`Inner.width = 5` (mine.gin:2) is replaced by `Inner.width = 64`" in line
        for line in config.undone()
    )
    config.load(["mine", "lm/base"], ["Inner.width = 7"])
    assert config.undone() == []
    with pytest.raises(config.ConfigError, match=r"lm/big\.gin before mine\.gin"):
        config.load(["mine", "lm/big"])
    params = ["Outer.first = @one.Twin()", "include 'lm/big'"]
    with pytest.raises(config.ConfigError, match=r"'lm/big'` \(gin parameters\) reads"):
        config.load(["lm/big"], params)


def test_a_misspelt_file_is_looked_for_beside_itself(tmp_path, monkeypatch):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "dates.gin").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("job/date.gin", str(tmp_path / "job" / "dats")):
        folder = name.rpartition("/")[0]
        message = f"no gin file '{name}', .*\\n  Did you mean {folder}/dates.gin\\?"
        with pytest.raises(config.ConfigError, match=message):
            config.find_gin_file(name)
    with pytest.raises(config.ConfigError) as info:  # Alike by its folder alone.
        config.find_gin_file(str(tmp_path / "job" / "mine.gin"))
    assert "dates.gin" not in str(info.value)


def test_a_macro_that_is_missing_is_not_another_that_ends_alike():
    with pytest.raises(config.ConfigError, match="constant %MODEL_DIMS") as info:
        config.load([], ["HIDDEN_DIMS = 256", "Inner.width = %MODEL_DIMS"])
    assert "HIDDEN_DIMS" not in str(info.value)
