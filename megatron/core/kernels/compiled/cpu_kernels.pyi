# Types of what csrc/cpu_kernels.cpp defines. Arrays are addresses of floats of 4 or 8 bytes
# (`bytes`), 0 for none; labels and places are int64.

INTERFACE: int

def swiglu(bytes: int, x: int, y: int, N: int, F: int, threads: int) -> None: ...
def swiglu_gradient(
    bytes: int, x: int, grad: int, dx: int, N: int, F: int, threads: int
) -> None: ...
def rms_norm(
    bytes: int, x: int, w: int, y: int, rho: int, N: int, H: int, eps: float, threads: int
) -> None: ...
def rms_norm_gradient(
    bytes: int,
    x: int,
    grad: int,
    w: int,
    rho: int,
    dx: int,
    dw: int,
    N: int,
    H: int,
    threads: int,
) -> None: ...
def rotate(
    bytes: int,
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
) -> None: ...
def statistics(
    bytes: int,
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
) -> None: ...
def cross_entropy_gradient(
    bytes: int,
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
) -> None: ...
def scatter(
    bytes: int, x: int, places: int, y: int, T: int, K: int, rows: int, H: int, threads: int
) -> None: ...
def sum(
    bytes: int, x: int, w: int, places: int, y: int, T: int, K: int, rows: int, H: int, threads: int
) -> None: ...
def sum_gradient(
    bytes: int,
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
) -> None: ...
