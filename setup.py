"""Installs the packages; the compiled helpers are optional, numpy and torch do the same job."""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
except ImportError as error:
    EXTENSIONS, COMMANDS = [], {}
    print(
        f"warning: nothing is compiled, numpy and torch do the same more slowly: {error}",
        file=sys.stderr,
    )
else:

    class OptionalBuild(build_ext):
        """Goes on without an extension that cannot be built (no compiler, no headers)."""

        def run(self) -> None:
            self.skipped: list[str] = []
            try:
                super().run()
            except Exception as error:
                for ext in self.extensions:
                    self._skip(ext, error)
            # What was made of other sources, and lies in place, must not pass for this.
            for name in self.skipped if self.inplace else ():
                Path(self.get_ext_fullpath(name)).unlink(missing_ok=True)

        def build_extension(self, ext: Pybind11Extension) -> None:
            try:
                super().build_extension(ext)
            except Exception as error:
                self._skip(ext, error)

        def copy_file(self, infile: str, outfile: str, *args: Any, **kwargs: Any) -> Any:
            # Whole or not at all: a process that loads half a library is killed.
            super().copy_file(infile, f"{outfile}.partial", *args, **kwargs)
            os.replace(f"{outfile}.partial", outfile)
            return outfile, True

        def _skip(self, ext: Pybind11Extension, error: Exception) -> None:
            print(
                f"warning: {ext.name}: not compiled, numpy and torch do the same more slowly: "
                f"{error}",
                file=sys.stderr,
            )
            self.skipped.append(ext.name)
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)

    # Apple's compiler has no OpenMP: one thread does all, and torch's operations are preferred.
    THREADS = ["-fopenmp"] if sys.platform.startswith("linux") else []
    # Loops of exp and of selections become vectors only where nobody reads error flags.
    MATH = ["-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]

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
            extra_compile_args=["-O3", *MATH, *THREADS],
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
