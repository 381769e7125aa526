"""What only a CUDA device can tell; all of it is skipped, with the reason, where there is none.

    make test-gpu                                       (or: python -m pytest -m gpu -rs tests/gpu)

One device runs all but the tests over NCCL, which wants a device for every process: these need two.
Layouts run on one device too, their processes connected by gloo.

    MEGATRON_GPU_TESTS_ON=cpu python -m pytest -m gpu tests/gpu

is a rehearsal on the CPU, with gloo in the place of NCCL: it finds mistakes in the tests, and says
nothing of CUDA.
"""
