"""Meshwright: TensorFlow programs on any mesh XLA can compile for."""

import pathlib

from setuptools import setup

ROOT = pathlib.Path(__file__).parent
ROOMS = ["framework", "layers", "tasks", "params", "trainers"]


def packages():
    """The rooms and all folders in them that hold code or gin files, as meshwright.*"""
    found = set()
    for room in ROOMS:
        for file in (ROOT / room).rglob("*"):
            if file.suffix in (".py", ".gin"):
                found.add(".".join(("meshwright", *file.parent.relative_to(ROOT).parts)))
    return sorted(found)


setup(
    name="meshwright",
    version="0.1.0",
    description="XLA's SPMD partitioner for TensorFlow programs, on every device",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"meshwright": "."},
    packages=packages(),
    package_data={"": ["*.gin"]},
    install_requires=[
        "absl-py",
        "gin-config",
        "jax>=0.10.2,<0.12",
        "numpy",
        "orbax-checkpoint",
        "tensorboard",
        "tensorflow>=2.21,<2.22",
        "tqdm",
    ],
    extras_require={
        "test": ["hypothesis", "pytest", "pytest-xdist", "ruff", "xprof"],
        "plan": ["libtpu"],
        "tpu": ["jax[tpu]>=0.10.2,<0.12"],
        "cuda": ["jax[cuda12]>=0.10.2,<0.12"],
    },
    entry_points={
        "console_scripts": ["meshwright-train=meshwright.trainers.train:run"],
    },
)
