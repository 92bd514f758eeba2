"""Lists, tables, configurations and command lines that are hostile by design."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from tests.fuzz.damage import floats, junk, utf8, words
from tests.fuzz.valid import CONFIG


def pos() -> st.SearchStrategy[bytes]:
    """Lines of catalogues in any order."""
    keyword = st.sampled_from(
        [
            "msgid",
            "msgstr",
            "msgctxt",
            "msgid_plural",
            "msgstr[0]",
            "msgstr[9]",
            "msgstr[]",
            "msgstr[-1]",
            "#,",
            "#:",
            "#|",
            "#~",
            "#~|",
            "#.",
            "#",
            "",
            "domain",
        ]
    )
    quoted = words.map(lambda text: json.dumps(text)) | words
    line = st.builds(lambda *parts: " ".join(parts), keyword, quoted)
    return st.lists(line, max_size=20).map(lambda lines: utf8("\n".join(lines)))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)
    ),
    max_leaves=8,
)
_deep = st.sampled_from(
    ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "NaN", "-Infinity"]
)


def datasets() -> st.SearchStrategy[bytes]:
    """Objects with the right keys and anything under them; nesting without end."""
    path = st.sampled_from(["a.nii", "b.nii", "c.nii", "./a.nii", "d.txt"]) | words
    case = st.fixed_dictionaries({"image": path | _json, "label": path | _json}) | _json
    labels = st.dictionaries(
        st.sampled_from(["0", "1", "2", "01", "-1", "x", "9" * 5000, "²"]),
        words | _json,
        max_size=3,
    )
    cases = st.lists(case, max_size=3) | _json
    content = st.fixed_dictionaries(
        {}, optional={"labels": labels | _json, "training": cases, "validation": cases}
    )
    return content.map(_dumped) | _json.map(_dumped) | _deep.map(str.encode)


def configs() -> st.SearchStrategy[bytes]:
    """A model's config.json with anything under some of its keys."""
    kinds = st.sampled_from(["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
    scaling = st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["linear", "llama3", "yarn", "dynamic"]) | _json},
        optional={
            key: _json | floats | st.integers(0, 2**1100)
            for key in ("factor", "original_max_position_embeddings", "beta_fast")
        },
    )
    more = {"rope_scaling": scaling | _json, "rope_parameters": scaling | _json}
    keys = (*CONFIG, "sliding_window_pattern", "layer_types", "max_window_layers")
    keys += ("use_sliding_window", "query_pre_attn_scalar", "quantization_config")
    more |= {key: _json | st.integers(0, 2**1100) for key in keys if key not in more}
    more["model_type"] |= kinds
    changed = st.fixed_dictionaries({}, optional=more)
    whole = changed.map(lambda changes: _dumped({**CONFIG, **changes}))
    return whole | _json.map(_dumped) | _deep.map(str.encode)


def indices() -> st.SearchStrategy[bytes]:
    """Indices of safetensors, of files that are anywhere."""
    files = ["a.safetensors", "../a.safetensors", ".", "", "/etc/passwd"]
    file = st.sampled_from(files)
    name = st.sampled_from(["model.norm.weight", "lm_head.weight"]) | words
    places = st.dictionaries(name, file | words | _json, max_size=4)
    index = st.fixed_dictionaries({}, optional={"weight_map": places | _json})
    return index.map(_dumped) | _json.map(_dumped) | _deep.map(str.encode)


def _dumped(content) -> bytes:
    return json.dumps(content).encode()


def objects() -> st.SearchStrategy[bytes]:
    """Lines of JSON: utterances, nearly, and anything else."""
    audio = st.just("a.wav") | words | _json
    entry = st.fixed_dictionaries({}, optional={"audio": audio, "text": words | _json})
    line = entry.map(_dumped) | _json.map(_dumped) | _deep.map(str.encode) | junk
    return st.lists(line, max_size=5).map(b"\n".join)


def columns(first: str) -> st.SearchStrategy[bytes]:
    """Lines of columns that tabs part."""
    cells = st.lists(st.just(first) | words, min_size=1, max_size=3)
    line = cells.map(lambda row: utf8("\t".join(row))) | junk
    return st.lists(line, max_size=5).map(b"\n".join)


def ratings() -> st.SearchStrategy[bytes]:
    """Columns in any order, values that are no numbers or too large ones."""
    names = ["userId", "movieId", "rating", "timestamp"]
    header = st.permutations(names) | st.lists(st.sampled_from(names), max_size=5)
    value = st.integers(-(2**70), 2**70).map(str) | st.integers(0, 3).map(str)
    value |= st.sampled_from(
        ["", "1.0", "1_0", "#", '"1"', "nan", "٣", " 1 ", "0x1", "9" * 5000]
    )
    row = st.lists(value, min_size=4, max_size=4) | st.lists(value | words, max_size=5)
    small = st.lists(st.integers(0, 3).map(str), min_size=4, max_size=4)
    return st.builds(
        lambda header, rows: utf8("\n".join(",".join(row) for row in (header, *rows))),
        header,
        st.lists(small | small | row, max_size=12),
    )


def gins() -> st.SearchStrategy[bytes]:
    """Bindings of known and unknown names to literals, references and worse."""
    name = st.sampled_from(
        [
            "Experiment.num_steps",
            "Experiment.task",
            "Experiment.seed",
            "Experiment.plan",
            "Experiment.global_batch",
            "MODEL_DIMS",
            "MESH_SHAPE",
            "NUM_LAYERS",
            "Adam.beta1",
            "Adam.learning_rate",
            "TextFiles.root",
            "TextFiles.excluded_dirs",
            "TextInput.seed",
            "LinearWarmup.schedule",
            "a/b/Adam.beta1",
            "NEW",
            "Repeat.body",
            "x.y.z",
            "gin.macro.value",
            "os.system.command",
            "ShardingPlan.weights",
            "Experiment.activation_dtype",
        ]
    )
    value = st.one_of(
        _json.map(repr),
        st.integers(-(10**40), 10**40).map(str),
        floats.map(repr),
        words.map(repr),
        words,
        st.sampled_from(
            [
                "%NEW",
                "%MODEL_DIMS",
                "[%NEW, %NEW]",
                "@Adam()",
                "@Adam",
                "@Experiment()",
                "%gin.REQUIRED",
                "@os.system()",
                "@gin.singleton()",
                "__import__('os').system('touch pwned')",
                "1 if True else 2",
                "lambda: 0",
                "1+1",
                "9**9**9",
                "'a' * 10**9",
                "{[]: 1}",
                "[" * 3000,
                "(" * 100 + ")" * 100,
                "-" * 3000 + "1",
                "9" * 5000,
                "1e999",
                "{" * 150 + "}" * 150,
                "b'\\xff'",
                "'\\ud800'",
                "f'{1}'",
                "...",
                "()",
                "(2, 4)",
                "0",
                "None",
                "float('nan')",
            ]
        ),
    )
    line = st.one_of(
        st.builds("{} = {}".format, name, value),
        st.builds("{} = {}".format, name, value),
        st.builds("{}:\n  {} = {}".format, name, words, value),
        words.map("include {!r}".format),
        st.sampled_from(
            [
                "include 'a.gin'",
                "include 'lm/stdlib_tiny.gin'",
                "include '/etc'",
                "include '/dev/zero'",
                "from __gin__ import dynamic_registration",
                "import os",
                "import antigravity",
                "import pickle",
                "from os import system",
                "import tests.fuzz.planted as p",
                "# é",
                "\x0c",
                "\\",
                "'''",
                "Adam.beta1 =",
                "\t\tx",
            ]
        ),
    )
    start = st.sampled_from(["include 'lm/stdlib_tiny.gin'", ""])
    return st.builds(
        lambda start, lines: utf8("\n".join([start, *lines, ""])),
        start,
        st.lists(line, max_size=4),
    )


def flags() -> st.SearchStrategy[bytes]:
    """Words of a command line, with odd values for flags there are."""
    name = st.sampled_from(
        [
            "gin_file",
            "gin_param",
            "device_count",
            "profile_steps",
            "json_out",
            "html_out",
            "search_batch",
            "search_microbatches",
            "search_budget",
            "search_jobs",
            "mode",
            "platform",
            "topology",
            "model_dir",
            "no_such",
        ]
    )
    value = words | st.sampled_from(
        [
            "-1",
            "0",
            "9" * 30,
            "9" * 5000,
            "1,2",
            "1,,2",
            "٣,4",
            "²",
            "1e3",
            "nan",
            "/",
            "a/b/c",
            "x\ny",
            "train",
            "tpu",
        ]
    )
    word = st.builds("--{}={}".format, name, value) | words
    return st.lists(word, max_size=4).map(lambda listed: utf8("\0".join(listed)))
