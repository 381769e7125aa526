// Optional compiled ops of megatron.core.kernels on the CPU: each makes one pass over memory where
// torch's operations make one each. `megatron/core/kernels/compiled/` holds their callers, which
// check what is handed over; the references beside it say what is computed. Built by setup.py when
// a compiler is there; never at run time.
//
// Arrays come as addresses, of floats or doubles, rows contiguous. Work is shared out over the
// threads that torch has: its OpenMP library is in the process already. No result depends on their
// number.
//
// Shapes: N rows, H or F width, T tokens, K choices of each, v columns of logits, V valid ones;
// S sequence, B batch, n heads, f frequencies.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace py = pybind11;

// Callers and this file must agree about arguments: raise it with every change of them.
constexpr int INTERFACE = 2;

// One machine builds, another runs: the widest vectors are chosen when the module is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define ANY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ANY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

// Numbers that a thread handles at least: a smaller share costs less than waking the thread.
constexpr int64_t SHARE = 1 << 14;
// Terms that are summed in their own type before they join a double.
constexpr int64_t BLOCK = 512;

template <typename Body>
void over_rows(int64_t rows, int64_t width, int threads, const Body& body) {
#ifdef _OPENMP
    const int64_t shares = std::min<int64_t>({threads, rows, rows * width / SHARE});
    if (shares > 1) {
#pragma omp parallel num_threads(static_cast<int>(shares))
        {
            const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
            body(rows * me / all, rows * (me + 1) / all);
        }
        return;
    }
#endif
    body(0, rows);
}

INLINE uint32_t bits(float x) {
    uint32_t result;
    std::memcpy(&result, &x, sizeof(result));
    return result;
}

INLINE float from_bits(uint32_t x) {
    float result;
    std::memcpy(&result, &x, sizeof(result));
    return result;
}

// exp(x) to one unit in the last place, without branches, so that loops of it become vectors.
// exp(x) = 2^n exp(r) with |r| <= ln(2) / 2; the polynomial is that of Moshier's Cephes library.
// Below 2^-125 it is 0.
INLINE float exponential(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
    const float shifted = x * 1.44269504088896341f + ROUND;
    const float n = shifted - ROUND;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^(n - 1), doubled: 2^n itself overflows in the last step below infinity.
    const float scale = from_bits((bits(shifted) - bits(ROUND) + 126u) << 23);
    const float y = p * scale * 2.0f;
    const float low = x < -86.6434f ? 0.0f : y;  // a NaN is neither below nor above
    return x > 88.722839f ? std::numeric_limits<float>::infinity() : low;
}

INLINE double exponential(double x) { return std::exp(x); }

// y = gate * sigmoid(gate) * up; a row of x is a gate half and an up half.
template <typename Real>
ANY_CPU void swiglu_rows(const Real* x, Real* y, int64_t F, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const Real *gate = x + i * 2 * F, *up = gate + F;
        Real* to = y + i * F;
#pragma omp simd
        for (int64_t j = 0; j < F; ++j)
            to[j] = gate[j] / (Real(1) + exponential(-gate[j])) * up[j];
    }
}

template <typename Real>
ANY_CPU void swiglu_gradient_rows(const Real* x, const Real* grad, Real* dx, int64_t F,
                                  int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const Real *gate = x + i * 2 * F, *up = gate + F, *g = grad + i * F;
        Real *dgate = dx + i * 2 * F, *dup = dgate + F;
#pragma omp simd
        for (int64_t j = 0; j < F; ++j) {
            const Real share = Real(1) / (Real(1) + exponential(-gate[j]));
            dup[j] = g[j] * gate[j] * share;
            dgate[j] = g[j] * up[j] * share * (Real(1) + gate[j] * (Real(1) - share));
        }
    }
}

// y = x / sqrt(mean(x^2) + eps) * w, and that factor of each row.
template <typename Real>
ANY_CPU void rms_norm_rows(const Real* x, const Real* w, Real* y, Real* rho, int64_t H, double eps,
                           int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const Real* from = x + i * H;
        Real* to = y + i * H;
        double squares = 0.0;
        for (int64_t first = 0; first < H; first += BLOCK) {
            const int64_t last = std::min(first + BLOCK, H);
            Real part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t j = first; j < last; ++j) part += from[j] * from[j];
            squares += part;
        }
        const Real factor =
            static_cast<Real>(1.0 / std::sqrt(squares / static_cast<double>(H) + eps));
        rho[i] = factor;
        if (w != nullptr) {
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] = from[j] * factor * w[j];
        } else {
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] = from[j] * factor;
        }
    }
}

// dx = rho g w - rho^3 x mean(g w x); adds g x rho of the rows to dw.
template <typename Real>
ANY_CPU void rms_norm_gradient_rows(const Real* x, const Real* grad, const Real* w, const Real* rho,
                                    Real* dx, Real* dw, int64_t H, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const Real *from = x + i * H, *g = grad + i * H;
        Real* to = dx + i * H;
        const Real factor = rho[i];
        double products = 0.0;
        for (int64_t first = 0; first < H; first += BLOCK) {
            const int64_t last = std::min(first + BLOCK, H);
            Real part = 0;
            if (w != nullptr) {
#pragma omp simd reduction(+ : part)
                for (int64_t j = first; j < last; ++j) {
                    const Real product = g[j] * from[j];
                    part += product * w[j];
                    dw[j] += product * factor;
                }
            } else {
#pragma omp simd reduction(+ : part)
                for (int64_t j = first; j < last; ++j) part += g[j] * from[j];
            }
            products += part;
        }
        const Real mean = static_cast<Real>(products / static_cast<double>(H));
        const Real back = factor * factor * factor * mean;
        if (w != nullptr) {
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] = factor * g[j] * w[j] - back * from[j];
        } else {
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] = factor * g[j] - back * from[j];
        }
    }
}

// Where the heads of a tensor [S, B, n, D] lie: elements from one to the next.
struct Strides {
    int64_t sequence, sample, head;
};

// Pairs of the first 2 f channels turned: (a, b) -> (a cos - b sin, b cos + a sin).
template <typename Real>
ANY_CPU void rotate_rows(const Real* x, Strides from, Real* y, Strides to, const Real* cosine,
                         const Real* sine, int64_t table_sequence, int64_t table_sample, int64_t B,
                         int64_t n, int64_t D, int64_t f, Real sign, bool interleaved,
                         int64_t begin, int64_t end) {
    const int64_t pair = interleaved ? 1 : f, step = interleaved ? 2 : 1;
    for (int64_t row = begin; row < end; ++row) {
        const int64_t s = row / B, b = row % B;
        const Real* c = cosine + s * table_sequence + b * table_sample;
        const Real* d = sine + s * table_sequence + b * table_sample;
        for (int64_t h = 0; h < n; ++h) {
            const Real* in = x + s * from.sequence + b * from.sample + h * from.head;
            Real* out = y + s * to.sequence + b * to.sample + h * to.head;
            if (step == 1) {
#pragma omp simd
                for (int64_t i = 0; i < f; ++i) {
                    const Real turned = d[i] * sign;
                    out[i] = in[i] * c[i] - in[i + pair] * turned;
                    out[i + pair] = in[i + pair] * c[i] + in[i] * turned;
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < f; ++i) {
                    const Real turned = d[i] * sign;
                    out[2 * i] = in[2 * i] * c[i] - in[2 * i + 1] * turned;
                    out[2 * i + 1] = in[2 * i + 1] * c[i] + in[2 * i] * turned;
                }
            }
            for (int64_t i = 2 * f; i < D; ++i) out[i] = in[i];
        }
    }
}

// What a rank knows of its logits, which become exp(x - largest); summed may be null.
template <typename Real>
ANY_CPU void statistics_rows(Real* x, int64_t v, int64_t V, const int64_t* label,
                             Real* largest, Real* total, Real* target, Real* summed, int64_t begin,
                             int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        Real* row = x + i * v;
        target[i] = label[i] < 0 ? Real(0) : row[label[i]];
        Real most = -std::numeric_limits<Real>::infinity();
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < V; ++j) most = row[j] > most ? row[j] : most;
        double exponentials = 0.0, logits = 0.0;
        for (int64_t first = 0; first < V; first += BLOCK) {
            const int64_t last = std::min(first + BLOCK, V);
            if (summed != nullptr) {
                Real sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t j = first; j < last; ++j) sum += row[j];
                logits += sum;
            }
            Real part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t j = first; j < last; ++j) {
                const Real y = exponential(row[j] - most);
                row[j] = y;
                part += y;
            }
            exponentials += part;
        }
        largest[i] = most;
        total[i] = static_cast<Real>(exponentials);
        if (summed != nullptr) summed[i] = static_cast<Real>(logits);
    }
}

// dx_j = grad (y_j / divisor - spread) - own [j == label], over the exponentials y.
template <typename Real>
ANY_CPU void cross_entropy_gradient_rows(Real* y, int64_t v, int64_t V, const int64_t* label,
                                         const Real* divisor, const Real* grad, const Real* own,
                                         Real spread, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        Real* row = y + i * v;
        const Real factor = grad[i] / divisor[i], less = grad[i] * spread;
#pragma omp simd
        for (int64_t j = 0; j < V; ++j) row[j] = row[j] * factor - less;
        if (label[i] >= 0) row[label[i]] -= own[i];
        std::fill(row + V, row + v, Real(0));
    }
}

// x[t] -> y[places[t, k]]; the place `rows` is none.
template <typename Real>
ANY_CPU void scatter_rows(const Real* x, const int64_t* places, Real* y, int64_t K, int64_t rows,
                          int64_t H, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
        for (int64_t k = 0; k < K; ++k) {
            const int64_t place = places[t * K + k];
            if (place < rows) std::copy(x + t * H, x + (t + 1) * H, y + place * H);
        }
}

// y[t] = sum over k of w[t, k] x[places[t, k]]; no weights are all 1.
template <typename Real>
ANY_CPU void gather_sum_rows(const Real* x, const Real* w, const int64_t* places, Real* y,
                             int64_t K, int64_t rows, int64_t H, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        Real* to = y + t * H;
        std::fill(to, to + H, Real(0));
        for (int64_t k = 0; k < K; ++k) {
            const int64_t place = places[t * K + k];
            if (place >= rows) continue;
            const Real weight = w == nullptr ? Real(1) : w[t * K + k];
            const Real* from = x + place * H;
#pragma omp simd
            for (int64_t j = 0; j < H; ++j) to[j] += weight * from[j];
        }
    }
}

// dx[place] = w[t, k] grad[t], dw[t, k] = x[place] . grad[t].
template <typename Real>
ANY_CPU void gather_sum_gradient_rows(const Real* x, const Real* w, const int64_t* places,
                                      const Real* grad, Real* dx, Real* dw, int64_t K, int64_t rows,
                                      int64_t H, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        const Real* g = grad + t * H;
        for (int64_t k = 0; k < K; ++k) {
            const int64_t place = places[t * K + k];
            dw[t * K + k] = 0;
            if (place >= rows) continue;
            const Real weight = w[t * K + k];
            const Real* from = x + place * H;
            Real* to = dx + place * H;
            double products = 0.0;
            for (int64_t first = 0; first < H; first += BLOCK) {
                const int64_t last = std::min(first + BLOCK, H);
                Real part = 0;
#pragma omp simd reduction(+ : part)
                for (int64_t j = first; j < last; ++j) {
                    part += from[j] * g[j];
                    to[j] = weight * g[j];
                }
                products += part;
            }
            dw[t * K + k] = static_cast<Real>(products);
        }
    }
}

using Address = uintptr_t;

template <typename Real>
Real* at(Address address) {
    return reinterpret_cast<Real*>(address);
}

// Calls `body(Real{})` for floats of 4 or 8 bytes, with Python free to go on beside it.
template <typename Body>
void with_real(int itemsize, const Body& body) {
    if (itemsize != 4 && itemsize != 8) throw std::invalid_argument("numbers have 4 or 8 bytes");
    py::gil_scoped_release release;
    if (itemsize == 4)
        body(float{});
    else
        body(double{});
}

void swiglu(int itemsize, Address x, Address y, int64_t N, int64_t F, int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(N, F, threads, [=](int64_t begin, int64_t end) {
            swiglu_rows(at<const Real>(x), at<Real>(y), F, begin, end);
        });
    });
}

void swiglu_gradient(int itemsize, Address x, Address grad, Address dx, int64_t N, int64_t F,
                     int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(N, F, threads, [=](int64_t begin, int64_t end) {
            swiglu_gradient_rows(at<const Real>(x), at<const Real>(grad), at<Real>(dx), F, begin,
                                 end);
        });
    });
}

void rms_norm(int itemsize, Address x, Address w, Address y, Address rho, int64_t N, int64_t H,
              double eps, int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(N, H, threads, [=](int64_t begin, int64_t end) {
            rms_norm_rows(at<const Real>(x), at<const Real>(w), at<Real>(y), at<Real>(rho), H, eps,
                          begin, end);
        });
    });
}

// Rows whose share of dw is summed on its own: the order of sums depends on N alone.
constexpr int64_t TOGETHER = 64;

void rms_norm_gradient(int itemsize, Address x, Address grad, Address w, Address rho, Address dx,
                       Address dw, int64_t N, int64_t H, int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        const int64_t groups = (N + TOGETHER - 1) / TOGETHER;
        std::vector<Real> parts(w ? static_cast<size_t>(groups * H) : 0);
        over_rows(groups, TOGETHER * H, threads, [&](int64_t first, int64_t last) {
            for (int64_t group = first; group < last; ++group)
                rms_norm_gradient_rows(at<const Real>(x), at<const Real>(grad), at<const Real>(w),
                                       at<const Real>(rho), at<Real>(dx),
                                       w ? parts.data() + group * H : nullptr, H, group * TOGETHER,
                                       std::min(N, (group + 1) * TOGETHER));
        });
        if (!w) return;
        for (int64_t j = 0; j < H; ++j) at<Real>(dw)[j] = 0;
        for (int64_t group = 0; group < groups; ++group)
            for (int64_t j = 0; j < H; ++j) at<Real>(dw)[j] += parts[group * H + j];
    });
}

using Three = std::tuple<int64_t, int64_t, int64_t>;

void rotate(int itemsize, Address x, Three from, Address y, Three to, Address cosine, Address sine,
            int64_t table_sequence, int64_t table_sample, int64_t S, int64_t B, int64_t n,
            int64_t D, int64_t f, int sign, bool interleaved, int threads) {
    const auto strides = [](Three of) {
        return Strides{std::get<0>(of), std::get<1>(of), std::get<2>(of)};
    };
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(S * B, n * D, threads, [=](int64_t begin, int64_t end) {
            rotate_rows(at<const Real>(x), strides(from), at<Real>(y), strides(to),
                        at<const Real>(cosine), at<const Real>(sine), table_sequence, table_sample,
                        B, n, D, f, static_cast<Real>(sign), interleaved, begin, end);
        });
    });
}

void statistics(int itemsize, Address x, int64_t N, int64_t v, int64_t V, Address label,
                Address largest, Address total, Address target, Address summed, int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(N, v, threads, [=](int64_t begin, int64_t end) {
            statistics_rows(at<Real>(x), v, V, at<const int64_t>(label), at<Real>(largest),
                            at<Real>(total), at<Real>(target), at<Real>(summed), begin, end);
        });
    });
}

void cross_entropy_gradient(int itemsize, Address y, int64_t N, int64_t v, int64_t V, Address label,
                            Address divisor, Address grad, Address own, double spread,
                            int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(N, v, threads, [=](int64_t begin, int64_t end) {
            cross_entropy_gradient_rows(at<Real>(y), v, V, at<const int64_t>(label),
                                        at<const Real>(divisor), at<const Real>(grad),
                                        at<const Real>(own), static_cast<Real>(spread), begin,
                                        end);
        });
    });
}

void scatter(int itemsize, Address x, Address places, Address y, int64_t T, int64_t K, int64_t rows,
             int64_t H, int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(T, K * H, threads, [=](int64_t begin, int64_t end) {
            scatter_rows(at<const Real>(x), at<const int64_t>(places), at<Real>(y), K, rows, H,
                         begin, end);
        });
    });
}

void gather_sum(int itemsize, Address x, Address w, Address places, Address y, int64_t T, int64_t K,
                int64_t rows, int64_t H, int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(T, K * H, threads, [=](int64_t begin, int64_t end) {
            gather_sum_rows(at<const Real>(x), at<const Real>(w), at<const int64_t>(places),
                            at<Real>(y), K, rows, H, begin, end);
        });
    });
}

void gather_sum_gradient(int itemsize, Address x, Address w, Address places, Address grad,
                         Address dx, Address dw, int64_t T, int64_t K, int64_t rows, int64_t H,
                         int threads) {
    with_real(itemsize, [=](auto real) {
        using Real = decltype(real);
        over_rows(T, K * H, threads, [=](int64_t begin, int64_t end) {
            gather_sum_gradient_rows(at<const Real>(x), at<const Real>(w),
                                     at<const int64_t>(places), at<const Real>(grad), at<Real>(dx),
                                     at<Real>(dw), K, rows, H, begin, end);
        });
    });
}

PYBIND11_MODULE(cpu_kernels, m) {
    m.attr("INTERFACE") = INTERFACE;
#ifdef _OPENMP
    m.attr("THREADED") = true;
#else
    m.attr("THREADED") = false;
#endif
    m.def("swiglu", &swiglu);
    m.def("swiglu_gradient", &swiglu_gradient);
    m.def("rms_norm", &rms_norm);
    m.def("rms_norm_gradient", &rms_norm_gradient);
    m.def("rotate", &rotate);
    m.def("statistics", &statistics);
    m.def("cross_entropy_gradient", &cross_entropy_gradient);
    m.def("scatter", &scatter);
    m.def("gather_sum", &gather_sum);
    m.def("gather_sum_gradient", &gather_sum_gradient);
}
