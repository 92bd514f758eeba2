"""Keras 3's layers with a legal setting each, and what they are called with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

LAYERS = keras.layers
ROWS = 8
SEQUENCE, IMAGE, VOLUME, RGB = (6, 8), (6, 6, 8), (4, 4, 4, 8), (8, 8, 3)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A layer and its inputs.

    Args:
      make: makes the layer.
      shapes: of its inputs, without the batch's dim.
      below: inputs are whole numbers below this; 0: normal floats.
      is_list: whether the layer takes a list of its inputs.
      is_pixels: whether inputs are between 0 and 255.
      is_smooth: whether gradients do not hang on how a number was rounded.
    """

    make: Callable[[], Any]
    shapes: Sequence[tuple[int, ...]]
    below: int = 0
    is_list: bool = False
    is_pixels: bool = False
    is_smooth: bool = True

    def inputs(self) -> list[np.ndarray]:
        """Host arrays [ROWS, ...]."""
        rng = np.random.default_rng(0)
        shapes = [(ROWS, *shape) for shape in self.shapes]
        if self.below:
            return [rng.integers(0, self.below, s).astype(np.int32) for s in shapes]
        if self.is_pixels:
            return [(255 * rng.random(s)).astype(np.float32) for s in shapes]
        return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def _of(names: str, shape: tuple[int, ...], *args: Any, **kwargs: Any):
    """The same arguments for layers whose names differ in a number or a word."""
    settings = ("is_pixels", "is_smooth")
    options = {key: kwargs.pop(key) for key in settings if key in kwargs}
    return {
        name: Setting(
            lambda n=name: getattr(LAYERS, n)(*args, **kwargs), [shape], **options
        )
        for name in names.split()
    }


def _of_two(names: str, *args: Any, **kwargs: Any):
    return {
        name: Setting(
            lambda n=name: getattr(LAYERS, n)(*args, **kwargs),
            [(4, 8)] * 2,
            is_list=True,
        )
        for name in names.split()
    }


def _cell(name: str) -> Setting:
    return Setting(lambda: LAYERS.RNN(getattr(LAYERS, name)(8)), [SEQUENCE])


def _adapted() -> Any:
    layer = LAYERS.Normalization()
    layer.adapt(np.arange(64, dtype=np.float32).reshape(8, 8))
    return layer


def _of_dims(name: str, *args: Any, dims: str = "123", **kwargs: Any):
    """A layer for sequences, images and volumes."""
    shapes = {"1": SEQUENCE, "2": IMAGE, "3": VOLUME}
    settings = {}
    for dim in dims:
        settings |= _of(name.replace("#", dim), shapes[dim], *args, **kwargs)
    return settings


SETTINGS: dict[str, Setting] = {
    **_of("Activation", (8,), "gelu"),
    **_of("ActivityRegularization", (8,), l2=0.1),
    **_of("ELU LeakyReLU PReLU ReLU Softmax Identity", (8,)),
    **_of("UnitNormalization LayerNormalization RMSNormalization", (8,)),
    **_of("BatchNormalization", IMAGE),
    **_of("GroupNormalization", IMAGE, groups=4),
    **_of("Dense", (8,), 16),
    **_of("EinsumDense", SEQUENCE, "abc,cd->abd", (6, 16)),
    **_of("AlphaDropout Dropout GaussianDropout", (8,), 0.3),
    **_of("GaussianNoise", (8,), 0.3),
    **_of("Flatten", IMAGE),
    **_of("Reshape", (16,), (2, 8)),
    **_of("Permute", SEQUENCE, (2, 1)),
    **_of("RepeatVector", (8,), 3),
    **_of("Lambda", (8,), lambda x: x * 2),
    **_of("Masking", SEQUENCE),
    **_of("Rescaling", (8,), 0.5),
    **_of("Discretization", (8,), bin_boundaries=[-1.0, 0.0, 1.0]),
    **_of_two("Add Average Concatenate Maximum Minimum Multiply Subtract"),
    **_of_two("Dot", axes=2),
    **_of_two("Attention AdditiveAttention"),
    **_of_dims("AdaptiveAveragePooling#D", 2),
    **_of_dims("AdaptiveMaxPooling#D", 2),
    **_of_dims("AveragePooling#D", 2),
    **_of_dims("MaxPooling#D"),
    **_of_dims("GlobalAveragePooling#D"),
    **_of_dims("GlobalMaxPooling#D"),
    **_of_dims("UpSampling#D", 2),
    **_of_dims("ZeroPadding#D", 1),
    **_of_dims("Cropping#D", 1),
    **_of_dims("SpatialDropout#D", 0.3),
    **_of_dims("Conv#D", 8, 3),
    **_of_dims("Conv#DTranspose", 8, 3),
    **_of_dims("DepthwiseConv#D", 3, dims="12"),
    **_of_dims("SeparableConv#D", 8, 3, dims="12"),
    **_of("LSTM GRU SimpleRNN", SEQUENCE, 8),
    **{name: _cell(name) for name in ("LSTMCell", "GRUCell", "SimpleRNNCell")},
    "RNN": _cell("LSTMCell"),
    "StackedRNNCells": Setting(
        lambda: LAYERS.RNN(LAYERS.StackedRNNCells([LAYERS.GRUCell(8)] * 1)), [SEQUENCE]
    ),
    "Bidirectional": Setting(lambda: LAYERS.Bidirectional(LAYERS.LSTM(8)), [SEQUENCE]),
    "TimeDistributed": Setting(
        lambda: LAYERS.TimeDistributed(LAYERS.Dense(8)), [SEQUENCE]
    ),
    **_of("ConvLSTM1D", (3, *SEQUENCE), 4, 3),
    **_of("ConvLSTM2D", (3, *IMAGE), 4, 3),
    **_of("ConvLSTM3D", (2, *VOLUME), 4, 3),
    "MultiHeadAttention": Setting(
        lambda: LAYERS.MultiHeadAttention(2, 4), [SEQUENCE] * 2
    ),
    "GroupQueryAttention": Setting(
        lambda: LAYERS.GroupQueryAttention(4, 4, 2), [SEQUENCE] * 2
    ),
    "SpectralNormalization": Setting(
        lambda: LAYERS.SpectralNormalization(LAYERS.Dense(8)), [(8,)]
    ),
    "Normalization": Setting(_adapted, [(8,)]),
    "Embedding": Setting(lambda: LAYERS.Embedding(16, 8), [(6,)], below=16),
    "ReversibleEmbedding": Setting(
        lambda: LAYERS.ReversibleEmbedding(16, 8), [(6,)], below=16
    ),
    "CategoryEncoding": Setting(
        lambda: LAYERS.CategoryEncoding(16, "multi_hot"), [(6,)], below=16
    ),
    "IntegerLookup": Setting(
        lambda: LAYERS.IntegerLookup(vocabulary=[3, 5, 7]), [(6,)], below=9
    ),
    "Hashing": Setting(lambda: LAYERS.Hashing(4), [(6,)], below=9),
    "HashedCrossing": Setting(
        lambda: LAYERS.HashedCrossing(4), [(), ()], below=9, is_list=True
    ),
    **_of("MelSpectrogram", (64,), fft_length=16, num_mel_bins=8, sequence_stride=8),
    **_of("STFTSpectrogram", (64, 1), frame_length=16, frame_step=8, fft_length=16),
    **_of("Resizing CenterCrop RandomCrop", RGB, 6, 6, is_pixels=True),
    **_of("Equalization Solarization", RGB, is_pixels=True),
    # It clips to what the largest pixel becomes.
    **_of("AutoContrast", RGB, is_pixels=True, is_smooth=False),
    **_of("ContrastLimitedAdaptiveHistogramEqualization", RGB, is_pixels=True),
    **_of("AugMix CutMix MixUp RandAugment RandomErasing", RGB, is_pixels=True),
    **_of("RandomFlip RandomGrayscale RandomElasticTransform", RGB, is_pixels=True),
    **_of("RandomBrightness RandomContrast RandomZoom", RGB, 0.3, is_pixels=True),
    **_of("RandomRotation RandomHue RandomInvert", RGB, 0.3, is_pixels=True),
    **_of("RandomSaturation RandomSharpness", RGB, 0.3, is_pixels=True),
    **_of("RandomColorDegeneration RandomPosterization", RGB, 1, is_pixels=True),
    **_of("RandomColorJitter RandomPerspective RandomShear", RGB, is_pixels=True),
    **_of("RandomGaussianBlur", RGB, is_pixels=True),
    **_of("RandomTranslation", RGB, 0.2, 0.2, is_pixels=True),
    "Pipeline": Setting(
        lambda: LAYERS.Pipeline([LAYERS.Rescaling(0.5), LAYERS.RandomFlip()]), [RGB]
    ),
}
ABSTRACT = {"InputLayer", "InputSpec", "Layer", "Wrapper"}
"""Classes that compute nothing by themselves."""
UNTESTED = {
    "FlaxLayer": "it wraps a Flax module, and Flax is not installed",
    "JaxLayer": "it wraps a JAX function",
    "MaxNumBoundingBoxes": "it pads a dict of boxes, for input pipelines",
    "StringLookup": "strings: XLA has none",
    "TFSMLayer": "it wraps a SavedModel that is on disk",
    "TextVectorization": "strings: XLA has none",
    "TorchModuleWrapper": "it wraps a PyTorch module",
}
"""Layers without a setting, and why."""
NO_JIT = {
    "AugMix": "StatelessRandomGammaV3",
    "CutMix": "StatelessRandomGammaV3",
    "HashedCrossing": "SparseCross",
    "Hashing": "AsString",
    "IntegerLookup": "LookupTable",
    "MixUp": "StatelessRandomGammaV3",
    "RandAugment": "ImageProjectiveTransformV3",
    "RandomElasticTransform": "Range",
    "RandomPerspective": "ImageProjectiveTransformV3",
    "RandomRotation": "ImageProjectiveTransformV3",
    "RandomShear": "ImageProjectiveTransformV3",
    "RandomTranslation": "ImageProjectiveTransformV3",
    "RandomZoom": "ImageProjectiveTransformV3",
}
"""Layers that TF itself does not compile on one device, and the op that it names."""
REFUSED = {
    "Equalization": "takes a size, shape or axis from the values of tensors",
    "RandomCrop": "a tensor has a size that depends on values",
}
"""Layers that TF's jit takes and Meshwright refuses, and what it says."""


def exported() -> set[str]:
    """A name for each class of `keras.layers`."""
    classes = dict(inspect.getmembers(LAYERS, inspect.isclass))
    settled = {*SETTINGS, *ABSTRACT, *UNTESTED}
    by_class: dict[type, str] = {}
    for name, kind in classes.items():
        if kind not in by_class or name in settled:
            by_class[kind] = name
    return set(by_class.values())
