"""Installs the packages; the compiled helpers are optional, numpy and torch do the same job."""

import sys

from setuptools import find_packages, setup

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
except ImportError:
    EXTENSIONS, COMMANDS = [], {}
else:

    class OptionalBuild(build_ext):
        """Goes on without an extension that cannot be built (no compiler, no headers)."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                _skipped(", ".join(ext.name for ext in self.extensions), error)

        def build_extension(self, ext: Pybind11Extension) -> None:
            try:
                super().build_extension(ext)
            except Exception as error:
                _skipped(ext.name, error)

    def _skipped(names: str, error: Exception) -> None:
        print(
            f"warning: {names}: not compiled, numpy and torch do the same more slowly: {error}",
            file=sys.stderr,
        )

    # Apple's compiler has no OpenMP: one thread does all.
    THREADS = ["-fopenmp"] if sys.platform.startswith("linux") else []

    EXTENSIONS = [
        Pybind11Extension(
            "megatron.core.datasets.index_helpers",
            ["csrc/index_helpers.cpp"],
            cxx_std=17,
            # A fused multiply-add would round a blend's lags differently from numpy.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=True,
        ),
        Pybind11Extension(
            "megatron.core.kernels.compiled.cpu_kernels",
            ["csrc/cpu_kernels.cpp"],
            cxx_std=17,
            # Loops of exp and of selections become vectors only where nobody reads error flags.
            extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", *THREADS],
            extra_link_args=THREADS,
            optional=True,
        ),
    ]
    COMMANDS = {"build_ext": OptionalBuild}

setup(
    name="megatron",
    version="0.1.0",
    description="Training of large transformer language models, with every kind of parallelism",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron", "megatron.*"]),
    package_data={"megatron.training.flags": ["*.tsv"]},
    ext_modules=EXTENSIONS,
    cmdclass=COMMANDS,
    # A container's own torch is never replaced: any recent one satisfies this.
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "pyyaml>=6",
        "sentencepiece>=0.2",
        "tensorboard>=2.15",
        "tiktoken>=0.7",
        "tokenizers>=0.19",
        "zstandard>=0.22",
    ],
    extras_require={
        "flash-attn": ["flash-attn>=2.6"],
        "transformer-engine": ["transformer-engine[pytorch]>=2.0"],
        "triton": ["triton>=3.4"],
        "wandb": ["wandb>=0.17"],
        "parquet": ["pyarrow>=15"],
        "ray": ["ray>=2.20"],
    },
)
