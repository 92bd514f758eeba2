"""Sounds and lists of them, for tests: no speech, but each letter has a pitch."""

import pathlib

import numpy as np
from scipy.io import wavfile

LETTER_SECONDS = 0.08
"""How long each letter sounds."""


def sound(text: str, rate: int = 16000) -> np.ndarray:
    """float32 [N], a pitch for each letter, softer at its ends, over a little noise."""
    t = np.arange(int(LETTER_SECONDS * rate)) / rate
    soft = np.sin(np.pi * np.arange(len(t)) / len(t))
    pitches = [0 if c == " " else 300 + 200 * (ord(c) - ord("a")) for c in text]
    parts = [soft * np.sin(2 * np.pi * pitch * t) for pitch in pitches]
    clear = 0.5 * np.concatenate(parts)
    noise = np.random.default_rng(0).standard_normal(len(clear))
    return (clear + 0.01 * noise).astype(np.float32)


def write_wav(path: pathlib.Path, samples: np.ndarray, rate: int = 16000) -> None:
    """Of the samples' own type."""
    wavfile.write(path, rate, samples)


def sentences(count: int, seed: int = 0) -> list[str]:
    """Words of a few letters, in sentences of 4 to 24 letters; each once."""
    rng = np.random.default_rng(seed)
    files = {}
    while len(files) < count:
        words = rng.integers(1, 6)
        sizes = rng.integers(2, 5, words)
        letters = ["".join(rng.choice(list("abcdefgh"), size)) for size in sizes]
        files[" ".join(letters)] = True
    return list(files)


def install(folder: pathlib.Path, texts: list[str]) -> pathlib.Path:
    """Writes a sound for each text, and the manifest."""
    lines = []
    for i, text in enumerate(texts):
        write_wav(folder / f"{i}.wav", sound(text))
        lines.append(f"{i}.wav\t{text}\n")
    manifest = folder / "manifest.tsv"
    manifest.write_text("".join(lines))
    return manifest
