# Types of what csrc/cpu_kernels.cpp defines. Arrays are addresses of floats of 4 or 8 bytes
# (`itemsize`), 0 for none; labels and places are int64.

INTERFACE: int
THREADED: bool

def swiglu(itemsize: int, x: int, y: int, N: int, F: int, threads: int, /) -> None: ...
def swiglu_gradient(
    itemsize: int, x: int, grad: int, dx: int, N: int, F: int, threads: int, /
) -> None: ...
def rms_norm(
    itemsize: int, x: int, w: int, y: int, rho: int, N: int, H: int, eps: float, threads: int, /
) -> None: ...
def rms_norm_gradient(
    itemsize: int,
    x: int,
    grad: int,
    w: int,
    rho: int,
    dx: int,
    dw: int,
    N: int,
    H: int,
    threads: int,
    /,
) -> None: ...
def rotate(
    itemsize: int,
    x: int,
    from_: tuple[int, ...],
    y: int,
    to: tuple[int, ...],
    cosine: int,
    sine: int,
    table_sequence: int,
    table_sample: int,
    S: int,
    B: int,
    n: int,
    D: int,
    f: int,
    sign: int,
    interleaved: bool,
    threads: int,
    /,
) -> None: ...
def statistics(
    itemsize: int,
    x: int,
    N: int,
    v: int,
    V: int,
    label: int,
    largest: int,
    total: int,
    target: int,
    summed: int,
    threads: int,
    /,
) -> None: ...
def cross_entropy_gradient(
    itemsize: int,
    y: int,
    N: int,
    v: int,
    V: int,
    label: int,
    divisor: int,
    grad: int,
    own: int,
    spread: float,
    threads: int,
    /,
) -> None: ...
def scatter(
    itemsize: int, x: int, places: int, y: int, T: int, K: int, rows: int, H: int, threads: int, /
) -> None: ...
def gather_sum(
    itemsize: int,
    x: int,
    w: int,
    places: int,
    y: int,
    T: int,
    K: int,
    rows: int,
    H: int,
    threads: int,
    /,
) -> None: ...
def gather_sum_gradient(
    itemsize: int,
    x: int,
    w: int,
    places: int,
    grad: int,
    dx: int,
    dw: int,
    T: int,
    K: int,
    rows: int,
    H: int,
    threads: int,
    /,
) -> None: ...
