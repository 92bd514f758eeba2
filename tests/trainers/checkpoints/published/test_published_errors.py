"""Files that are not those of the model, or of nobody, are told with a remedy."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from meshwright.framework.nested_map import NestedMap
from meshwright.tasks.text.text_input import TextInput
from meshwright.trainers.checkpoints.checkpoints import CheckpointError
from meshwright.trainers.checkpoints.published import published_weights
from meshwright.trainers.experiment.step_programs import StepPrograms
from tests.trainers.checkpoints.published.published_cases import (
    CASES,
    LLAMA3,
    S,
    experiment,
    imported,
    programs_of,
    random_tensors,
    write,
)

NAME = "model.layers.1.self_attn.k_proj.weight"


def told(path, name="llama", **fields) -> str:
    with pytest.raises(CheckpointError) as error:
        imported(programs_of(name), path, **fields)
    return str(error.value)


@pytest.fixture
def published(tmp_path):
    """Writes a case's files, changed by a function of config and tensors."""

    def make(change=lambda config, tensors: None, name="llama", **kwargs):
        config = json.loads(json.dumps(CASES[name].config))
        tensors = random_tensors(config)
        change(config, tensors)
        write(tmp_path / "in", config, tensors, **kwargs)
        return tmp_path / "in"

    return make


def lacking(config, tensors):
    del tensors[NAME]


def extra(config, tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros([32], np.float32)


def turned(config, tensors):
    """As many elements, but in another shape."""
    tensors[NAME] = np.ascontiguousarray(tensors[NAME].reshape(8, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lacking,
            rf"{re.escape(NAME)} \[16, 16\] is missing, which is to be "
            r"stack\.attention\.w_k\[1\]\nget the files again that belong",
        ),
        (
            extra,
            r"layers\.0\.self_attn\.q_proj\.bias float32\[32\] goes nowhere\nsee Init",
        ),
        (turned, rf"{re.escape(NAME)} is float32\[8, 32\], and .*_k\[1\] needs \[16, "),
    ],
)
def test_tensors_that_do_not_fit(published, change, message):
    text = told(published(change))
    assert re.search(message, text)
    assert text.count("\n") == 2  # One problem, between two lines.


def test_what_may_be_missing_or_left(published):
    folder = published(lambda c, t: (extra(c, t), t.pop("lm_head.weight")))
    fields = {"missing": "initialize", "unused": "ignore"}
    taken = imported(programs_of("llama"), folder, **fields)
    assert "softmax.kernel" not in taken and "stack.attention.w_q" in taken


def test_tensors_that_follow_from_others_are_no_error(published):
    def more(config, tensors):
        frequency = np.ones([4], np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = frequency
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    folder, programs = (
        published(more, "llama_tied_biased"),
        programs_of("llama_tied_biased"),
    )
    for unused in (None, "error"):
        imported(programs, folder, unused=unused)


def test_a_head_of_its_own_is_no_shared_table(published, monkeypatch):
    # Compared piece by piece, of which the last one differs.
    monkeypatch.setattr(published_weights, "_PIECE_BYTES", 4 * 16 * 100)

    def more(config, tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    name = "llama_tied_biased"
    folder = published(more, name)
    assert re.search(
        r"lm_head\.weight has other values than model\.embed_tokens\.weight, .*: set "
        r"LanguageModel\.softmax",
        told(folder, name),
    )
    imported(programs_of(name), folder, unused="ignore")


def test_weights_of_another_tokenizer(published, caplog):
    """Whose vocabulary has more ids than bytes have."""
    programs = wide_programs()

    def more(config, tensors):
        config["vocab_size"] = 600
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensors[name] = np.zeros([600, 16], np.float32)

    folder = published(more)
    with pytest.raises(CheckpointError) as error:
        imported(programs, folder)
    assert re.search(
        r"config\.json has vocab_size 600, but LanguageModel\.text, a TextInput, has "
        r"264 ids, .* or set InitializeFrom\.any_tokenizer to take",
        str(error.value),
    )
    assert "softmax.kernel" in imported(programs, folder, any_tokenizer=True)
    assert not caplog.text
    imported(programs, folder, missing="initialize")
    assert "another tokenizer" in caplog.text
    # Vocabularies are rounded up.
    imported(wide_programs(WideText), folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideText(TextInput):
    """Text whose ids are not those of bytes."""

    @property
    def vocab_size(self) -> int:
        return 560

    def read_train(self, steps, rows):
        def moved(batch):
            return NestedMap(
                batch, ids=batch.ids + 300 * tf.cast(batch.ids > 1, "int32")
            )

        return super().read_train(steps, rows).map(moved)


def wide_programs(text=None) -> StepPrograms:
    made = experiment("llama", "VOCAB_SIZE = 600")
    if text is None:
        return StepPrograms(made)
    given = text(files=made.task.text.files, sequence_length=S)
    task = dataclasses.replace(made.task, text=given)
    return StepPrograms(dataclasses.replace(made, task=task))


def test_an_input_of_other_ids_is_told_of_like_that_of_bytes():
    task = wide_programs(WideText).experiment.task
    batch = next(iter(task.text.train_batches(0, global_batch=2, rows=range(2))))
    assert batch.ids.numpy().max() > 300
    assert task.describe_data()["training files"] > 0
    assert task.data_fingerprint()["TextInput.sequence_length"] == S


def test_another_class_is_a_warning(published, caplog):
    imported(programs_of("llama"), published(says(architectures=["MyLlama"])))
    assert re.search(r"names \['MyLlama'\], and not LlamaForCausalLM: its", caplog.text)


def says(**changes):
    return lambda config, tensors: config.update(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention_bias": True},
            r"layer 0: MultiHeadAttention\.use_bias is False, but attention_bias in "
            r"config\.json has True\n  layer 0: MultiHeadAttention\.use_out_bias is ",
        ),
        ({"mlp_bias": True}, r"FeedForward\.use_bias is False, but mlp_bias in"),
        ({"num_hidden_layers": 3}, "the number of layers is 2, but num_hidden_layers"),
        ({"num_key_value_heads": None}, r"num_kv_heads is 2, but .* has 4\n"),
        ({"head_dim": None}, r"head_dim is 8, but head_dim in config\.json has 4\n"),
        ({"rms_norm_eps": 1e-5}, r"RMSNorm\.epsilon is 1e-06, but .* has 1e-05\n"),
        (
            {"rope_theta": 1e4},
            r"rotary_base is 500000\.0, but .* 10000\.0\n",
        ),
        ({"rope_scaling": None}, r"rotary_scaling is Llama3Scaling\(.*\), but .* None"),
        (
            {"hidden_act": "relu2"},
            r"is Activation\.GATED_SILU, but hidden_act .* relu2",
        ),
        (
            {"tie_word_embeddings": True},
            r"softmax is SHARED is False, but tie_word",
        ),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config in config.json",
        ),
        (
            {"is_causal": False},
            "is_causal in config.json has False, which is not here:",
        ),
        ({"compression_config": {"bits": 4}}, "compression_config in config.json has"),
        ({"auto_map": {"AutoModel": "my.Model"}}, "auto_map in .*: take it out of"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor in .* has 0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_scaling in config\.json has rope_type 'dynamic': known here are "
            r"default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "two"}},
            r"rope_scaling .* makes no sense \(LinearScaling\.factor is 'two'",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}},
            "has mscale_all_dim of rope_type 'yarn'",
        ),
        ({"rope_scaling": 8}, "rope_scaling in config.json is 8, no object"),
        ({"rope_parameters": 8}, "rope_parameters in config.json is 8, no object"),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            r"rope_scaling .* of rope_type 'llama3' has no factor, low_freq_factor, "
            r"high_freq_factor, original_max_position_embeddings, which it needs",
        ),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": None}},
            "has no low_freq_factor, which it needs",
        ),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 0}},
            r"makes no sense \(Llama3Scaling\.low_turns is 0",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor, which it needs"),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
                "max_position_embeddings": None,
            },
            r"makes no sense \(YarnScaling\.original_length is None",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters .* has partial_rotary_factor of rope_type 'default'",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}},
            r"rope_parameters .* makes Rotary\(.*None\), but rope_scaling Rotary\(.*"
            r"Llama3Scaling\(.*: leave the wrong one out",
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
            r"makes Rotary\(base=10000.0, .*, but rope_scaling Rotary\(base=500000.0,",
        ),
        (
            {"rope_parameters": {"full_attention": LLAMA3}, "rope_scaling": None},
            "rope_parameters in config.json has full_attention of rope_type 'default'",
        ),
        (
            {"model_type": "gpt2"},
            "has model_type 'gpt2', which is none of llama",
        ),
        ({"model_type": ["llama"]}, r"has model_type \['llama'\], which is none of"),
        ({"hidden_size": "16"}, "has hidden_size '16', which must be a number above 0"),
    ],
)
def test_a_config_of_another_model(published, changes, message):
    assert re.search(message, told(published(says(**changes))))


def test_kinds_of_layers_that_are_not_here(published):
    kinds = ["chunked_attention", "full_attention"] * 2
    text = told(published(says(layer_types=kinds), "gemma2"), "gemma2")
    assert re.search("mask is 6, but sliding_window .* has chunked_attention", text)
    text = told(published(says(layer_types=kinds[1:2]), "gemma2"), "gemma2")
    assert re.search("layer 0: the window .* is 6, but .* has None", text)
    kinds = ["sliding_attention", "full_attention"]
    text = told(published(says(layer_types=kinds), "gemma2"), "gemma2")
    assert re.search("layer 2: the window .* is 6, but .* has no kind", text)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"full_attention": {}}, "sliding_attention"),
        ({"sliding_attention": {}, "full_attention": None}, "full_attention"),
        ({"rope_type": "default", "rope_theta": 1e6}, "sliding_attention"),
    ],
)
def test_parameters_that_leave_out_kinds_of_layers(published, said, kind):
    folder = published(says(rope_scaling=None, rope_parameters=said), "gemma3")
    assert f"has no object {kind}, of such layers" in told(folder, "gemma3")


def test_a_folder_without_a_config(published):
    folder = published()
    (folder / "config.json").unlink()
    assert re.search(
        r"there is no .*/config\.json, .* or set InitializeFrom\.mapping", told(folder)
    )


@pytest.mark.parametrize("text", ["[]", "{", '"llama"', "\x00\xff", "[" * 100000])
def test_a_config_that_is_none(published, text):
    folder = published()
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert re.search(r"config\.json cannot be read \(.*get it again", told(folder))


def test_files_that_are_not_there(tmp_path, published):
    assert "there is no file" in told(tmp_path / "none.safetensors")
    assert "copy it to one" in told("gs://bucket/model.safetensors")
    folder = published(files=2)
    (folder / "model.safetensors.index.json").rename(tmp_path / "index")
    assert re.search(
        r"in has model-00001-of-00002\.safetensors, .*, but neither model\."
        r"safetensors\.index\.json, .*, nor model\.safetensors: get what is missing",
        told(folder),
    )
    (tmp_path / "index").rename(folder / "model.safetensors.index.json")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert re.search(
        r"index\.json names model-00002-of-00002\.safetensors, which is not there: get",
        told(folder),
    )


def test_a_folder_on_a_bucket_has_to_be_copied():
    tf.io.gfile.makedirs("ram://bucket/model")
    for name in ("config.json", "model-00001-of-00001.safetensors"):
        with tf.io.gfile.GFile(f"ram://bucket/model/{name}", "w") as file:
            file.write("{}")
    assert "ram://bucket/model is not on a disk: copy" in told("ram://bucket/model")


def change_index(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index: index["weight_map"].update(
                {"x": "model-00001-of-00002.safetensors"}
            ),
            "which it does not: the files are of different versions, get all",
        ),
        (
            lambda index: index["weight_map"].update({"x": "../x.safetensors"}),
            r"names '\.\./x\.safetensors', which is no file beside it: put all",
        ),
        (lambda index: index.update(weight_map=[]), "has no weight_map from names of"),
        (lambda index: index["weight_map"].update({"x": 5}), "names 5, which is no"),
    ],
)
def test_an_index_that_is_wrong(published, change, message):
    folder = published(files=2)
    change_index(folder, change)
    assert re.search(message, told(folder))


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_a_file_that_is_cut_short(published, kept):
    folder = published()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert re.search(
        r"model\.safetensors cannot be read \(.*it is damaged or was not fetched whole",
        told(folder),
    )


def test_integers_are_no_weights(published):
    """Such as those of a quantized model."""
    folder = published()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))
    assert re.search(r"is i32\[.*\] in the checkpoint, .* is float32", told(folder))


def test_steps_are_those_of_a_model_dir(published):
    text = told(published(), step=5)
    assert "step and part are for a model_dir, but" in text and "safetensors" in text


def test_safetensors_that_is_not_installed(published, monkeypatch):
    folder = published()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'meshwright[safetensors]'" in told(folder)
