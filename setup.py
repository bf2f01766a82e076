"""Packaging of tfdpclip. Tool settings are in pyproject.toml."""

import pathlib
import re
import runpy

import setuptools

ROOT = pathlib.Path(__file__).resolve().parent

# Where packages are listed there is nothing but this text: links to files of the
# repository would lead nowhere, so their words are left.
DESCRIPTION = re.sub(
    r"\[([^\]]+)\]\((?!https?:)[^)]+\)",
    r"\1",
    (ROOT / "README.md").read_text(encoding="utf-8"),
)

# TensorBoard comes with TensorFlow 2.14, and `tf.summary` needs it.
PLOTS = ["matplotlib>=3.7", "tensorboard>=2.14"]
EXAMPLES = ["scikit-learn>=1.3", *PLOTS]
HUB = ["keras-hub>=0.32; python_version>='3.11'"]
BENCHMARKS = [
    "pandas>=2.0",
    "psutil>=5.9",
    # Not for Python 3.12, and its import fails with TensorFlow 2.21.
    "tensorflow-privacy>=0.9.0; python_version=='3.11'",
    "tqdm>=4.64",
    *PLOTS,
]
TEST = [
    "hypothesis>=6.100",
    "packaging>=21.0",
    "pandas>=2.0",
    "psutil>=5.9",
    "pytest>=8.2",
    "pytest-timeout>=2.2",
    "pytest-xdist>=3.6",
    *EXAMPLES,
]
DEV = [*TEST, "mypy>=1.10", "ruff>=0.6"]

setuptools.setup(
    name="tfdpclip",
    version=runpy.run_path(str(ROOT / "tfdpclip" / "_version.py"))["__version__"],
    description="Differentially private training with TensorFlow, by better clipping",
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    author="The authors of tfdpclip",
    keywords="differential-privacy dp-sgd tensorflow keras federated-learning",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=setuptools.find_packages(
        include=[
            f"{package}{submodules}"
            for package in ("tfdpclip", "driver_kit", "tff_tasks", "keras_examples")
            for submodules in ("", ".*")
        ]
    ),
    package_data={"tfdpclip": ["py.typed"]},
    # For this and `install_requires`, docs/stacks.md has the stacks.
    python_requires=">=3.10,<3.14",
    install_requires=[
        "absl-py>=1.0",
        # The events of dp-accounting are attrs classes, and so are those added to them.
        "attrs>=22.2",
        "dp-accounting>=0.4.3",
        "numpy>=1.23.5",
        "scipy>=1.9",
        # 2.14 has Keras 2, and 2.21 takes Keras 3 or tf_keras. No test runs between.
        "tensorflow>=2.14,<2.22,!=2.15.*,!=2.16.*,!=2.17.*,!=2.18.*,!=2.19.*,!=2.20.*",
        "tqdm>=4.64",
    ],
    extras_require={
        # `pip install tfdpclip[tff]` cannot be resolved: tensorflow-federated 0.87
        # requires exactly jaxlib 0.4.14, which is no longer published. Install
        # requirements.txt with `pip install --no-deps --require-hashes` instead, as
        # the Makefile does. The extra states what the federated half needs.
        "tff": ["tensorflow-federated>=0.87.0,<0.88", "grpcio", "h5py"],
        # For docs/notebooks/lora.ipynb and `python -m keras_examples.fine_tune
        # --preset`, with Keras 3. Not for Python 3.10.
        "hub": HUB,
        "plots": PLOTS,
        "examples": EXAMPLES,
        "benchmarks": BENCHMARKS,
        "test": TEST,
        "dev": DEV,
        # All that pip can resolve, so without `tff`.
        "all": sorted({*EXAMPLES, *BENCHMARKS, *DEV, *HUB}),
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security",
        "Typing :: Typed",
    ],
)
