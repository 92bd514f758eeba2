"""From wav files to log-mel features, and their masking in training.

Dims: B batch, N samples, T frames, F mel bins.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import warnings

import gin
import numpy as np
import tensorflow as tf

from meshwright.framework.modeling import random
from meshwright.framework.modeling.checks import Checked, bounded, check_number
from meshwright.framework.modeling.layer import Context, Layer, Mode
from meshwright.framework.nested_map import NestedMap

SAMPLE_RATE = 16000
"""The sampling rate of all sounds after `read_wav`, in Hz."""

# Least and largest rates of files, in Hz: telephones have 8000, bats 384000. Resampling
# from an absurd rate would take all memory: the filter has some 20 * rate numbers.
_RATES = (1000, 400_000)

# Limit of samples that are no integers: full scale is 1, but some files have 2**31.
_LOUDEST = 2.0**31

# Added to energies before the logarithm, as in digital silence; samples are in [-1, 1].
_QUIET = 1e-6


def read_wav(path: str | os.PathLike) -> np.ndarray:
    """The sound in a wav file, float32 [N] at `SAMPLE_RATE`, full scale 1.

    Samples may be integers of 8, 16, 24 or 32 bits or floating point; channels are
    averaged.

    Raises:
      OSError: there is no such file, or it cannot be read.
      ValueError: it is no wav file, or a broken one; the message has path and contents.
    """
    rate, samples = _read(path, mmap=False)
    if samples.dtype == np.uint8:
        sound = samples.astype(np.float32) / 128 - 1
    elif samples.dtype.kind == "i":  # 24 bits come as 32, the lowest 8 being 0.
        sound = samples.astype(np.float32) / -float(np.iinfo(samples.dtype).min)
    else:
        sound = samples.astype(np.float32)
    if not np.abs(sound).max() <= _LOUDEST:
        raise ValueError(
            f"{path} has samples that are not finite, or beyond {_LOUDEST:g} where 1 "
            "is full scale: leave it out"
        )
    if sound.ndim == 2:
        sound = sound.mean(axis=1)
    if rate != SAMPLE_RATE:
        divisor = math.gcd(rate, SAMPLE_RATE)
        up, down = SAMPLE_RATE // divisor, rate // divisor
        sound = _scipy().signal.resample_poly(sound, up, down)
    return sound


def wav_length(path: str | os.PathLike) -> int:
    """The number of samples that `read_wav` returns, mostly by the header alone.

    Raises:
      OSError, ValueError: as `read_wav`, and for a file that was cut off; samples that
        are not finite are not noticed.
    """
    try:
        rate, samples = _read(path, mmap=True)
    except ValueError:  # 24 bits cannot be mapped, nor can files that are cut off.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Reached EOF prematurely")
            rate, samples = _read(path, mmap=False)
    return -(-len(samples) * SAMPLE_RATE // rate)


def _read(path: str | os.PathLike, *, mmap: bool) -> tuple[int, np.ndarray]:
    """The sampling rate in Hz, and samples [N] or [N, channels], of any type."""
    try:
        rate, samples = _scipy().io.wavfile.read(path, mmap=mmap)
    except FileNotFoundError as e:
        raise FileNotFoundError(f"there is no sound file {path}") from e
    except OSError as e:
        if e.filename is not None:
            raise
        raise _unreadable(path, e) from e  # It sought a position beyond the file.
    # For a false header SciPy raises whatever failed first.
    except Exception as e:
        raise _unreadable(path, e) from e
    if not len(samples):
        raise ValueError(f"{path} is a wav file without any sound: leave it out")
    if not _RATES[0] <= rate <= _RATES[1]:
        raise ValueError(
            f"{path} has {rate} samples a second, out of {_RATES[0]} to {_RATES[1]}: "
            "its header is broken, or leave it out"
        )
    return rate, samples


def _unreadable(path: str | os.PathLike, error: Exception) -> ValueError:
    with open(path, "rb") as file:
        start = file.read(12)
    return ValueError(
        f"{path} is no wav file that can be read: it begins with {start!r} and has "
        f"{os.path.getsize(path)} bytes ({error}): make it PCM or float wav, by ffmpeg "
        "or sox, or leave it out"
    )


def _scipy():
    try:
        import scipy  # Only speech needs it.
        import scipy.io.wavfile
        import scipy.signal
    except ImportError as e:
        raise ImportError(
            "wav files need scipy, which is not installed: pip install "
            "'meshwright[asr]'"
        ) from e
    return scipy


@gin.constants_from_enum
class Normalization(enum.Enum):
    """The statistics that bring each mel bin to mean 0 and deviation 1.

    UTTERANCE takes each utterance's own statistics; GLOBAL those of the training data,
    which keeps loud and quiet sounds apart.
    """

    UTTERANCE = "utterance"
    GLOBAL = "global"


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMel(Checked):
    """Log energies in mel bins of overlapping windows.

    Args:
      bins: F.
      window: samples of a window; 400 are 25 ms.
      hop: samples from one window to the next; 160 are 10 ms.
      low_hz: lower end of the lowest bin.
      high_hz: upper end of the highest bin.
      normalization: how each bin is normalized.

    Raises:
      ValueError: a size below 1, or frequencies out of order.
    """

    bins: int = bounded(80, at_least=1)
    window: int = bounded(400, at_least=1)
    hop: int = bounded(160, at_least=1)
    low_hz: float = 20.0
    high_hz: float = bounded(8000.0, at_least=1, below=SAMPLE_RATE / 2 + 1)
    normalization: Normalization = Normalization.UTTERANCE

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "low_hz", at_least=0, below=self.high_hz)

    def frames(self, samples: int) -> int:
        """T of a sound of `samples` samples: only complete windows make a frame."""
        return max(0, 1 + (samples - self.window) // self.hop)

    def samples(self, frames: int) -> int:
        """N of the shortest sound that makes `frames` frames, one or more."""
        return self.window + (frames - 1) * self.hop

    def energies(self, sound: tf.Tensor) -> tf.Tensor:
        """Log energies float32 [B, T, F], not normalized, of sounds [B, N]."""
        fft_length = 2 ** math.ceil(math.log2(self.window))
        spectrum = tf.signal.stft(sound, self.window, self.hop, fft_length)
        to_mel = tf.signal.linear_to_mel_weight_matrix(
            self.bins, fft_length // 2 + 1, SAMPLE_RATE, self.low_hz, self.high_hz
        )
        power = tf.square(tf.abs(spectrum))
        return tf.math.log(tf.matmul(power, to_mel) + _QUIET)

    def normalized(
        self, energies: tf.Tensor, frames: tf.Tensor, statistics: np.ndarray | None
    ) -> tf.Tensor:
        """Features, 0 in padding.

        Args:
          energies: float32 [B, T, F].
          frames: int32 [B], how many of the T frames count.
          statistics: [2, F], mean and deviation, or None to take each row's own.
        """
        counts = tf.range(tf.shape(energies)[1])[None] < frames[:, None]
        counts = tf.cast(counts, tf.float32)[:, :, None]
        if statistics is None:
            total = tf.maximum(tf.reduce_sum(counts, axis=1, keepdims=True), 1.0)
            mean = tf.reduce_sum(energies * counts, axis=1, keepdims=True) / total
            squares = tf.square(energies - mean) * counts
            deviation = tf.sqrt(tf.reduce_sum(squares, axis=1, keepdims=True) / total)
        else:
            mean, deviation = tf.unstack(tf.cast(statistics, tf.float32))
        # A bin may be constant, as in silence.
        return (energies - mean) / tf.maximum(deviation, 1e-3) * counts


@gin.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecAugment(Layer):
    """Masks random bands of bins and of time in training (Park et al. 2019).

    Masked values become 0, the mean of normalized features. Time is not warped, which
    the paper found to matter least. Defaults are the paper's "LibriSpeech double" but
    for `time_share`, which keeps short utterances legible.

    Args:
      bin_masks: number of bands of bins; they may overlap.
      bin_width: the largest width of a band; widths are random.
      time_masks: number of stretches of time.
      time_width: the most frames of a stretch.
      time_share: the largest share of the utterance that a stretch takes.

    Raises:
      ValueError: a number is below 0, or a share above 1.
    """

    bin_masks: int = bounded(2, at_least=0)
    bin_width: int = bounded(27, at_least=0)
    time_masks: int = bounded(2, at_least=0)
    time_width: int = bounded(100, at_least=0)
    time_share: float = bounded(0.2, at_least=0, at_most=1)

    def fprop(
        self, ctx: Context, theta: NestedMap, x: tf.Tensor, *, frames: tf.Tensor
    ) -> tf.Tensor:
        """`x` [B, T, F], masked in `Mode.TRAIN`.

        Args:
          ctx: context; whether an element is masked depends on its key and place alone.
          theta: empty.
          x: the features.
          frames: int32 [B], how many of the T frames count.

        Raises:
          ValueError: features are to be masked and the context has no key.
        """
        del theta
        if ctx.mode is Mode.EVAL:
            return x
        B, T, F = x.shape
        bins = tf.fill([B], float(F))
        length = tf.cast(frames, tf.float32)
        widest = tf.minimum(float(self.time_width), self.time_share * length)
        with ctx.scope("bins") as c:
            in_band = _bands(
                c, self.bin_masks, F, bins, tf.fill([B], float(self.bin_width))
            )
        with ctx.scope("time") as c:
            in_stretch = _bands(c, self.time_masks, T, length, widest)
        return tf.where(in_band[:, None, :] | in_stretch[:, :, None], 0.0, x)


def _bands(
    ctx: Context, count: int, size: int, length: tf.Tensor, widest: tf.Tensor
) -> tf.Tensor:
    """bool [B, size], True in each of `count` random bands per row.

    Args:
      ctx: the context, which has the key.
      count: number of bands per row.
      size: number of places.
      length: float32 [B], the number of first places that may be in a band.
      widest: float32 [B], the most places of a band.
    """
    draws = random.uniform(ctx.random_key(), [2, *length.shape, count])
    width = tf.floor(draws[0] * (tf.minimum(widest, length) + 1)[:, None])
    start = tf.floor(draws[1] * (length[:, None] - width + 1))
    place = tf.range(size, dtype=tf.float32)[None, None]
    inside = (place >= start[:, :, None]) & (place < (start + width)[:, :, None])
    return tf.reduce_any(inside, axis=1)
