// Optional compiled loops of megatron.core.datasets: the same arrays as the numpy code, in less
// memory and time. Built by setup.py when a compiler is there; never at run time.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Where each sample starts: rows of (position in the document index, offset); see samples.py.
// Walks the documents once, keeping the stream position of the current one.
Array<int64_t> sample_index(const Array<int32_t>& lengths, const Array<int32_t>& documents,
                            int64_t seq_length, int64_t num_samples, int64_t extra) {
    const auto length = lengths.unchecked<1>();
    const auto document = documents.unchecked<1>();
    const int64_t count = document.shape(0);
    if (count == 0) throw std::invalid_argument("the document index is empty");
    Array<int64_t> result({num_samples + 1, int64_t{2}});
    auto out = result.mutable_unchecked<2>();
    out(0, 0) = 0;
    out(0, 1) = 0;
    {
        py::gil_scoped_release release;
        int64_t position = 0;
        int64_t start = 0;  // stream position of the current document
        int64_t here = length(document(0));
        for (int64_t i = 1; i <= num_samples; ++i) {
            const int64_t last_token = i * seq_length + extra - 1;
            while (start + here <= last_token && position < count - 1) {
                start += here;
                here = length(document(++position));
            }
            out(i, 0) = position;
            // Only the last sample can end beyond the stream: it is kept although it is short.
            out(i, 1) = std::min(last_token + 1 - start, here) - extra;
        }
    }
    return result;
}

// Members chosen greedily by lag, and the number of each choice within its member.
class Blend {
  public:
    Blend(const double* shares, int64_t members, int64_t size)
        : shares_(shares, shares + members), taken_(members, 0), member_(size), number_(size) {}

    // Gives sample i to the allowed member furthest behind its share, the first of equals.
    template <typename Allowed>
    int64_t choose(int64_t i, Allowed allowed) {
        const double samples = static_cast<double>(std::max<int64_t>(i, 1));
        double largest = -std::numeric_limits<double>::infinity();
        int64_t chosen = 0;
        for (int64_t m = 0; m < static_cast<int64_t>(shares_.size()); ++m) {
            if (!allowed(m, taken_[m])) continue;
            const double lag = shares_[m] * samples - static_cast<double>(taken_[m]);
            if (lag > largest) {
                largest = lag;
                chosen = m;
            }
        }
        member_.mutable_data()[i] = static_cast<int16_t>(chosen);
        number_.mutable_data()[i] = taken_[chosen]++;
        return chosen;
    }

    std::pair<Array<int16_t>, Array<int64_t>> result() { return {member_, number_}; }

  private:
    std::vector<double> shares_;
    std::vector<int64_t> taken_;
    Array<int16_t> member_;
    Array<int64_t> number_;
};

std::pair<Array<int16_t>, Array<int64_t>> blend(const Array<double>& shares, int64_t size) {
    Blend walk(shares.data(), shares.size(), size);
    for (int64_t i = 0; i < size; ++i) walk.choose(i, [](int64_t, int64_t) { return true; });
    return walk.result();
}

std::pair<Array<int16_t>, Array<int64_t>> blend_all(const Array<int64_t>& sizes) {
    const int64_t* limit = sizes.data();
    int64_t total = 0;
    for (int64_t m = 0; m < sizes.size(); ++m) total += limit[m];
    std::vector<double> shares;
    for (int64_t m = 0; m < sizes.size(); ++m)
        shares.push_back(static_cast<double>(limit[m]) / static_cast<double>(total));
    Blend walk(shares.data(), sizes.size(), total);
    for (int64_t i = 0; i < total; ++i)
        walk.choose(i, [limit](int64_t m, int64_t taken) { return taken < limit[m]; });
    return walk.result();
}

PYBIND11_MODULE(index_helpers, m) {
    m.def("sample_index", &sample_index);
    m.def("blend", &blend);
    m.def("blend_all", &blend_all);
}
