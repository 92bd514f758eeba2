"""Meshwright: TensorFlow programs on any mesh XLA can compile for."""

import pathlib

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
ROOMS = ["framework", "layers", "tasks", "params", "trainers"]


def packages():
    """Every room and the folders under it, as meshwright.*"""
    folders = [folder for room in ROOMS for folder in (ROOT / room).glob("**/")]
    return sorted(
        ".".join(("meshwright", *folder.relative_to(ROOT).parts))
        for folder in folders
        if folder.name != "__pycache__"
    )


setup(
    name="meshwright",
    version="0.1.0",
    description="XLA's SPMD partitioner for TensorFlow programs, on every device",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    package_dir={"meshwright": "."},
    packages=packages(),
    package_data={"": ["*.gin", "*.map", "*.html", "*.css", "*.js"]},
    install_requires=[
        "absl-py",
        "etils[epath]",
        "flatbuffers",
        "gin-config",
        "google-crc32c",
        "h5py",
        "jax>=0.10.2,<0.12",
        "keras",
        "numpy",
        "orbax-checkpoint",
        "tensorboard",
        "tensorflow>=2.21,<2.22",
        "tensorstore",
        "tqdm",
        "werkzeug",
    ],
    extras_require={
        "test": ["hypothesis", "pytest", "pytest-cov", "pytest-xdist", "ruff", "xprof"],
        "docs": ["mkdocs<2", "mkdocs-material"],
        "plan": ["libtpu", "matplotlib"],
        "plan_gpu": ["jax-cuda12-plugin>=0.10.2,<0.12"],
        "mt": ["polib", "sacrebleu", "sentencepiece"],
        "asr": ["jiwer", "scipy"],
        "seg": ["nibabel", "scipy"],
        "safetensors": ["safetensors"],
        "zoo": [
            "dm-sonnet",
            "keras-hub",
            "keras-rs",
            "tensorflow-probability",
            "tf_keras",
        ],
        "tpu": ["jax[tpu]>=0.10.2,<0.12"],
        "cuda": ["jax[cuda12]>=0.10.2,<0.12"],
    },
    entry_points={
        "console_scripts": [
            "meshwright-export=meshwright.trainers.export:run",
            "meshwright-generate=meshwright.trainers.generate:run",
            "meshwright-plan=meshwright.trainers.plan:run",
            "meshwright-train=meshwright.trainers.train:run",
        ],
        "tensorboard_plugins": [
            "meshwright=meshwright.trainers.planning.tensorboard.plugin:MeshwrightPlugin",
        ],
    },
)
