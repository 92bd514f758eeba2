"""Small labelled volumes as NIfTI files, for tests: boxes, brighter by class."""

import gzip
import json
import pathlib

import nibabel
import numpy as np

CLASSES = ("background", "liver", "tumour")
"""Names of label values 0, 1 and 2."""


def affine_of(codes: str, spacing=(1.0, 1.0, 1.0), origin=(0.0, 0.0, 0.0)):
    """float64 [4, 4]: axes that run to `codes`, such as "LPS" or "SRA"."""
    affine = np.zeros([4, 4])
    for axis, (code, size) in enumerate(zip(codes, spacing, strict=True)):
        row = next(i for i, pair in enumerate(("LR", "PA", "IS")) if code in pair)
        affine[row, axis] = size if code in "RAS" else -size
    affine[:3, 3], affine[3, 3] = origin, 1
    return affine


def write(path: pathlib.Path, values: np.ndarray, affine=None, unit="mm") -> str:
    """Writes values of their own type; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine)
    image.header.set_xyzt_units(unit)
    nibabel.save(image, path)
    return str(path)


def patched(at: int, *values, dtype="<i2"):
    """What overwrites the bytes of a file from one on, and compresses it."""

    def patch(content: bytes) -> bytes:
        new = np.array(values, dtype).tobytes()
        return gzip.compress(content[:at] + new + content[at + len(new) :])

    return patch


def boxes(shape=(12, 10, 8), seed=0) -> np.ndarray:
    """uint8 [X, Y, Z]: a box of 1 in 0, one of 2 in that; somewhere else each time."""
    rng = np.random.default_rng(seed)
    label = np.zeros(shape, np.uint8)
    for value, share in ((1, 0.6), (2, 0.3)):
        low = [rng.integers(0, max(1, int(n * (1 - share)))) for n in shape]
        inside = (slice(a, a + int(n * share)) for a, n in zip(low, shape, strict=True))
        label[tuple(inside)] = value
    return label


def image_of(label: np.ndarray, channels=1, seed=0) -> np.ndarray:
    """float32, of the label's shape and channels if several: 100 a class, and noise."""
    rng = np.random.default_rng(seed)
    shape = label.shape if channels == 1 else (*label.shape, channels)
    noise = rng.standard_normal(shape, np.float32)
    clear = 100.0 * label.astype(np.float32)
    return 10 * noise + (clear if channels == 1 else clear[..., None])


def install(
    folder: pathlib.Path, count=6, shape=(12, 10, 8), affine=None, channels=1, held=2
) -> pathlib.Path:
    """Writes volumes, the last `held` of them held out, and returns their list."""
    entries = []
    for i in range(count):
        entry = {"image": f"./imagesTr/{i}.nii.gz", "label": f"./labelsTr/{i}.nii.gz"}
        label = boxes(shape, seed=i)
        write(folder / entry["image"], image_of(label, channels, seed=i), affine)
        write(folder / entry["label"], label, affine)
        entries.append(entry)
    return write_list(
        folder, entries[: count - held], validation=entries[count - held :]
    )


def write_list(folder: pathlib.Path, training, **others) -> pathlib.Path:
    """Writes dataset.json; what is given replaces its keys."""
    labels = {str(value): name for value, name in enumerate(CLASSES)}
    path = folder / "dataset.json"
    path.write_text(json.dumps({"labels": labels, "training": training, **others}))
    return path
