"""Wav files of every kind, features, and their masking."""

import struct
import wave

import numpy as np
import pytest
import tensorflow as tf
from scipy.io import wavfile

from meshwright.framework.compiler.xla.partitioner import Partitioner
from meshwright.framework.modeling.layer import Context, Mode
from meshwright.framework.modeling.random import key_from_seed
from meshwright.framework.nested_map import NestedMap
from meshwright.framework.sharding.plan import ShardingPlan
from meshwright.framework.testing import assert_layer_parity
from meshwright.tasks.speech.speech_audio import (
    LogMel,
    SpecAugment,
    read_wav,
    wav_length,
)
from tests.fuzz.valid import wav

SECONDS = 0.25
ENCODINGS = {
    "uint8": (lambda x: np.round(127 * x + 128).astype(np.uint8), 1 / 128),
    "int16": (lambda x: np.round(32767 * x).astype(np.int16), 1e-4),
    "int32": (lambda x: np.round((2**31 - 129) * x).astype(np.int32), 1e-6),
    "float32": (lambda x: x.astype(np.float32), 1e-6),
    "float64": (lambda x: x, 1e-6),
}


def tone(rate, hz=440.0):
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(int(SECONDS * rate)) / rate)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_sample_type_sounds_the_same(tmp_path, encoding):
    encode, error = ENCODINGS[encoding]
    path = tmp_path / "x.wav"
    wavfile.write(path, 16000, encode(tone(16000)))
    clip = read_wav(path)
    assert clip.dtype == np.float32 and wav_length(path) == len(clip)
    np.testing.assert_allclose(clip, tone(16000), rtol=0, atol=error)


def test_24_bits_in_two_channels_are_averaged(tmp_path):
    path = tmp_path / "x.wav"
    left = np.round((2**23 - 1) * tone(16000)).astype("<i4")
    both = np.stack([left, np.zeros_like(left)], axis=1).astype("<i4")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(3)
        file.setframerate(16000)
        file.writeframes(both.reshape(-1, 1).view(np.uint8)[:, :3].tobytes())
    clip = read_wav(path)
    assert wav_length(path) == len(clip)
    np.testing.assert_allclose(clip, tone(16000) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_every_rate_becomes_16_khz(tmp_path, rate):
    path = tmp_path / "x.wav"
    wavfile.write(path, rate, tone(rate).astype(np.float32))
    clip = read_wav(path)
    assert wav_length(path) == len(clip)
    assert len(clip) == pytest.approx(SECONDS * 16000, abs=2)
    middle = slice(400, 3600)  # The filter rings at the ends.
    np.testing.assert_allclose(clip[middle], tone(16000)[middle], rtol=0, atol=5e-3)


def wav_bytes(tmp_path, samples):
    path = tmp_path / "whole.wav"
    wavfile.write(path, 16000, samples)
    return path.read_bytes()


def broken(tmp_path):
    content = wav_bytes(tmp_path, np.ones(400, np.int16))
    yield b"ID3\x04, an mp3", r"begins with b'ID3\\x04, an mp3'"
    yield b"fLaC", r"begins with b'fLaC' and has 4 bytes"
    yield b"", r"begins with b'' and has 0 bytes"
    yield content[:20], "no wav file that can be read"
    yield content[:36], "no wav file that can be read"
    yield wav_bytes(tmp_path, np.ones(0, np.int16)), "without any sound"
    no_rate = content[:24] + struct.pack("<II", 0, 0) + content[32:]
    yield no_rate, "has 0 samples a second"


def test_what_is_no_wav_file_is_named_with_what_it_is(tmp_path):
    for i, (content, message) in enumerate(broken(tmp_path)):
        path = tmp_path / f"bad{i}.wav"
        path.write_bytes(content)
        for read in (read_wav, wav_length):
            with pytest.raises(ValueError, match=message) as error:
                read(path)
            assert str(path) in str(error.value)
    path.write_bytes(wav_bytes(tmp_path, np.ones(400, np.int16))[:-100])
    with pytest.raises(ValueError, match="Reached EOF prematurely"):
        wav_length(path)
    with pytest.raises(FileNotFoundError, match=r"no sound file .*absent\.wav"):
        read_wav(tmp_path / "absent.wav")


def test_samples_that_are_not_finite_are_refused(tmp_path):
    path = tmp_path / "x.wav"
    wavfile.write(path, 16000, np.array([0, np.nan, 1], np.float32))
    with pytest.raises(ValueError, match="samples that are not finite"):
        read_wav(path)


@pytest.mark.parametrize("loud", [3e38, 1e10])
def test_samples_that_are_far_too_loud_are_refused(tmp_path, loud):
    wavfile.write(tmp_path / "x.wav", 16000, np.array([0.0, loud]))
    with pytest.raises(ValueError, match="x.wav has samples .*beyond 2.14748e.09"):
        read_wav(tmp_path / "x.wav")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"channels": 0, "align": 2}, "is no wav file that can be read.*by zero"),
        ({"channels": 4, "align": 2}, "is no wav file that can be read.*by zero"),
        ({"align": 16, "bits": 32}, "is no wav file that can be read.*i16"),
        ({"rate": 0}, "has 0 samples a second, out of 1000 to 400000"),
        ({"rate": 1}, "has 1 samples a second"),
        ({"rate": 2**32 - 5, "kind": 3, "bits": 32}, "has 4294967291 samples a second"),
    ],
)
@pytest.mark.parametrize("read", [read_wav, wav_length])
def test_a_header_that_is_not_true_is_named(tmp_path, read, header, message):
    (tmp_path / "x.wav").write_bytes(wav(bytes(64), **header))
    with pytest.raises(ValueError, match=f"x.wav {message}"):
        read(tmp_path / "x.wav")


def test_a_tone_is_loudest_in_the_bin_around_it():
    mel = LogMel(bins=40)
    hz = 1000.0
    sound = tf.constant(tone(16000, hz)[None], tf.float32)
    energies = mel.energies(sound)
    assert energies.shape == (1, mel.frames(4000), 40) == (1, 23, 40)
    in_mels = lambda f: 1127 * np.log1p(f / 700)  # noqa: E731
    edges = np.linspace(in_mels(20), in_mels(8000), 42)
    nearest = int(np.argmin(np.abs(edges[1:-1] - in_mels(hz))))
    assert set(np.argmax(energies[0], axis=-1)) == {nearest}


@pytest.mark.parametrize("frames", [1, 2, 100])
def test_so_many_samples_are_so_many_frames(frames):
    mel = LogMel()
    samples = mel.samples(frames)
    assert mel.frames(samples) == frames == mel.frames(samples + mel.hop - 1)
    assert mel.frames(samples - 1) == frames - 1
    assert LogMel().frames(3) == 0


def test_padding_changes_no_feature_and_is_zero():
    mel = LogMel()
    noise = np.random.default_rng(0).standard_normal([1, mel.samples(30)])
    alone = mel.energies(tf.constant(noise, tf.float32))
    padded = mel.energies(
        tf.constant(np.pad(noise, [[0, 0], [0, 20 * mel.hop]]), tf.float32)
    )
    count = tf.constant([30])
    want = mel.normalized(alone, count, None).numpy()
    features = mel.normalized(padded, count, None).numpy()
    np.testing.assert_allclose(features[:, :30], want, rtol=0, atol=1e-5)
    assert not features[:, 30:].any()
    np.testing.assert_allclose(want.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(want.std(axis=1), 1, atol=1e-4)
    statistics = np.stack([np.full(80, 2.0), np.full(80, 4.0)])
    by_all = mel.normalized(padded, count, statistics).numpy()
    np.testing.assert_allclose(by_all[:, :30], (alone - 2) / 4, rtol=0, atol=1e-5)
    assert np.isfinite(mel.normalized(tf.zeros([1, 3, 80]), count[:1] * 0, None)).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bins": 0}, r"LogMel.bins is 0; .* at least 1"),
        ({"high_hz": 9000.0}, "LogMel.high_hz is 9000"),
        ({"low_hz": 500.0, "high_hz": 400.0}, "LogMel.low_hz is 500"),
        ({"normalization": "global"}, "one of Normalization.UTTERANCE"),
    ],
)
def test_wrong_features(kwargs, message):
    with pytest.raises(ValueError, match=message):
        LogMel(**kwargs)


def masked(augment, frames, T=100, F=40, seed=0):
    """bool [B, T, F], what became 0."""
    ctx = Context(mode=Mode.TRAIN, key=key_from_seed(seed))
    frames = tf.constant(frames)
    x = tf.ones([len(frames), T, F])
    return augment.fprop(ctx, NestedMap(), x, frames=frames).numpy() == 0


def runs(row):
    """Lengths of the stretches that are True."""
    edges = np.flatnonzero(np.diff(np.r_[False, row, False].astype(int)))
    return edges[1::2] - edges[::2]


def test_bands_have_the_widths_asked_for():
    augment = SpecAugment(bin_masks=1, bin_width=8, time_masks=0)
    rows = masked(augment, [100] * 400)
    assert (rows == rows[:, :1]).all()
    widths = rows[:, 0].sum(axis=-1)
    assert set(widths) == set(range(9)), "all widths up to the largest one"
    assert all(len(runs(row)) <= 1 for row in rows[:, 0])
    where = rows[:, 0].mean(axis=0)
    assert where.min() > 0, "every bin may be masked"
    augment = SpecAugment(bin_masks=0, time_masks=1, time_width=30, time_share=0.1)
    rows = masked(augment, [100] * 200 + [50] * 200)
    assert (rows == rows[:, :, :1]).all()
    widths = rows[:, :, 0].sum(axis=-1)
    assert widths[:200].max() == 10 and widths[200:].max() == 5
    assert not rows[200:, 50:].any(), "padding needs no mask"


def test_each_row_and_each_step_is_masked_otherwise():
    augment = SpecAugment()
    rows = masked(augment, [100] * 4)
    assert len({row.tobytes() for row in rows}) == 4
    assert (rows != masked(augment, [100] * 4, seed=1)).any()
    np.testing.assert_array_equal(rows, masked(augment, [100] * 4))
    x = tf.ones([1, 5, 4])
    evaluated = augment.fprop(Context(), NestedMap(), x, frames=tf.constant([5]))
    assert evaluated is x
    with pytest.raises(ValueError, match="needs random numbers"):
        augment.fprop(Context(mode=Mode.TRAIN), NestedMap(), x, frames=tf.constant([5]))


@pytest.mark.parametrize("partitioner", Partitioner)
def test_eight_devices_mask_as_one(partitioner):
    plan = ShardingPlan(mesh_axes=("X",), mesh_shape=(8,), activations={"batch": "X"})
    x = np.random.default_rng(0).standard_normal([8, 40, 16]).astype(np.float32)
    augment = SpecAugment(bin_width=6, time_width=10)
    frames = np.arange(5, 45, 5).astype(np.int32)
    assert_layer_parity(augment, x, plan=plan, partitioner=partitioner, frames=frames)


@pytest.mark.parametrize("field", ["bin_masks", "time_width", "time_share"])
def test_wrong_masks(field):
    with pytest.raises(ValueError, match=f"SpecAugment.{field} is -1"):
        SpecAugment(**{field: -1})
