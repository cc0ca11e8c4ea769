// The operators of kernels/*_torch.py for the CPU, registered with PyTorch. Their Python side is ops.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <vector>

#include "attention.h"
#include "custom_call.h"
#include "gemm.h"
#include "linear.h"
#include "packed.h"
#include "parallel.h"
#include "pointwise.h"
#include "prefill.h"
#include "program.h"
#include "select.h"

namespace {

using at::Tensor;

// Rows of x up to which reading the weight decides the time of a product; and up to which our kernel for these beats
// PyTorch's products.
constexpr int64_t kFewRows = 8, kFewerThanTorch = 32;
// Rows of one request from which packing its keys and values pays.
constexpr int64_t kManyRows = 16;

// Calls f with a value of the tensor's element type.
template <class Function>
void with_type(const Tensor& tensor, const char* op, Function f) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(c10::BFloat16{});
    case at::kHalf:
      return f(c10::Half{});
    default:
      TORCH_CHECK(false, op, " takes float32, bfloat16 or float16, not ", tensor.scalar_type());
  }
}

// Calls f with a value of the element type of a KV cache: 8-bit floats, or the type T of what is written and read.
template <class T, class Function>
void with_cache_type(const Tensor& cache, bool scaled, const char* op, Function f) {
  TORCH_CHECK((cache.scalar_type() == at::kFloat8_e4m3fn) == scaled, op, ": a cache of ", cache.scalar_type(),
              scaled ? " with scales" : " without scales");
  if (scaled) return f(c10::Float8_e4m3fn{});
  TORCH_CHECK(cache.scalar_type() == c10::CppTypeToScalarType<T>::value, op, ": ", cache.scalar_type(), " and ",
              c10::CppTypeToScalarType<T>::value);
  return f(T{});
}

// Element `index` of a small float32 tensor, or `otherwise` if there is none.
float element(const std::optional<Tensor>& tensor, int64_t index, float otherwise) {
  if (!tensor) return otherwise;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous() && tensor->numel() > index,
              "scales are contiguous and float32");
  return tensor->const_data_ptr<float>()[index];
}

void check_same(const char* op, const Tensor& a, const Tensor& b) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), op, ": ", a.scalar_type(), " and ", b.scalar_type());
}

void check_indices(const char* op, const Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt, op, " takes int32 indices, not ", tensor.scalar_type());
}

// Microseconds that so many elements take, for parallel::loop.
double elements(int64_t count) { return double(count) * 5e-4; }

Tensor embedding(const Tensor& ids, const Tensor& table) {
  check_indices("embedding", ids);
  const Tensor index = ids.contiguous(), rows = table.contiguous();
  const int64_t count = index.numel(), bytes = rows.size(1) * rows.element_size();
  Tensor out = at::empty({count, rows.size(1)}, rows.options());
  const auto* id = index.const_data_ptr<int32_t>();
  for (int64_t t = 0; t < count; t++) {
    TORCH_CHECK_INDEX(0 <= id[t] && id[t] < rows.size(0), "token id ", id[t], " of a vocabulary of ", rows.size(0));
    std::memcpy(static_cast<char*>(out.mutable_data_ptr()) + t * bytes,
                static_cast<const char*>(rows.const_data_ptr()) + id[t] * bytes, bytes);
  }
  return out;
}

// Whether PyTorch has a faster product of many rows of this type than we: where there is an instruction for it that ours
// does without.
bool torch_multiplies(at::ScalarType type) {
#if defined(__AVX512BF16__)
  if (type == at::kBFloat16) return true;
#endif
#if defined(__AVX512FP16__)
  if (type == at::kHalf) return true;
#endif
  return false;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool theirs = torch_multiplies(x.scalar_type()), few = x.size(0) <= (theirs ? kFewerThanTorch : kFewRows);
  if (x.size(0) == 0 || weight.size(0) == 0 || (theirs && !few)) return at::linear(x, weight, bias);
  check_same("linear", x, weight);
  TORCH_CHECK(x.size(1) == weight.size(1), "linear: x ", x.sizes(), " and weight ", weight.sizes());
  const Tensor rows = x.contiguous(), matrix = weight.contiguous();
  const Tensor offset = bias ? bias->contiguous() : Tensor();
  if (bias) check_same("linear", x, offset);
  Tensor out = at::empty({rows.size(0), matrix.size(0)}, rows.options());
  with_type(rows, "linear", [&](auto type) {
    using T = decltype(type);
    const auto multiply = few ? product::few_rows<T> : product::many_rows<T>;
    multiply(rows.const_data_ptr<T>(), matrix.const_data_ptr<T>(), bias ? offset.const_data_ptr<T>() : nullptr,
             out.mutable_data_ptr<T>(), rows.size(0), matrix.size(0), rows.size(1));
  });
  return out;
}

// The threads with which PyTorch would widen a large vocabulary go on spinning for milliseconds, and take the cores from
// the kernels that follow.
Tensor logits(const Tensor& hidden, const Tensor& weight) {
  const Tensor narrow = ::linear(hidden, weight, std::nullopt);
  if (narrow.scalar_type() == at::kFloat) return narrow;
  constexpr int64_t kPiece = 4096;
  const int64_t count = narrow.numel();
  Tensor out = at::empty(narrow.sizes(), narrow.options().dtype(at::kFloat));
  auto* to = out.mutable_data_ptr<float>();
  with_type(narrow, "logits", [&](auto type) {
    const auto* from = narrow.const_data_ptr<decltype(type)>();
    parallel::loop((count + kPiece - 1) / kPiece, elements(kPiece), [&](int64_t i) {
      const int64_t begin = i * kPiece;
      pointwise::widen(from + begin, to + begin, std::min(kPiece, count - begin));
    });
  });
  return out;
}

// A tensor whose last dimension is contiguous, as rows in up to two dimensions.
struct Rows {
  Tensor tensor;
  int64_t outer, inner, outer_stride, inner_stride, size;

  explicit Rows(const Tensor& x) {
    tensor = x.dim() <= 3 && x.stride(-1) == 1 ? x : x.contiguous();
    size = tensor.size(-1);
    inner = tensor.dim() == 3 ? tensor.size(1) : 1;
    inner_stride = tensor.dim() == 3 ? tensor.stride(1) : 0;
    outer = size && inner ? tensor.numel() / (size * inner) : 0;
    outer_stride = tensor.dim() == 1 ? 0 : tensor.dim() <= 3 ? tensor.stride(0) : size;
  }

  int64_t count() const { return outer * inner; }

  template <class T>
  const T* at(int64_t row) const {
    return tensor.const_data_ptr<T>() + row / inner * outer_stride + row % inner * inner_stride;
  }
};

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_same("rms_norm", x, weight);
  const Rows rows(x);
  const Tensor gain = weight.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  with_type(x, "rms_norm", [&](auto type) {
    using T = decltype(type);
    auto* to = out.mutable_data_ptr<T>();
    const auto* scale = gain.const_data_ptr<T>();
    parallel::loop(rows.count(), elements(rows.size), [&](int64_t row) {
      pointwise::rms_norm(rows.at<T>(row), scale, to + row * rows.size, rows.size, float(eps));
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  check_same("add_rms_norm", x, residual);
  check_same("add_rms_norm", x, weight);
  const Rows a(x), b(residual);
  const Tensor gain = weight.contiguous();
  Tensor normed = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
  with_type(x, "add_rms_norm", [&](auto type) {
    using T = decltype(type);
    auto *sum = total.mutable_data_ptr<T>(), *to = normed.mutable_data_ptr<T>();
    const auto* scale = gain.const_data_ptr<T>();
    parallel::loop(a.count(), elements(2 * a.size), [&](int64_t row) {
      T* here = sum + row * a.size;
      pointwise::add(a.at<T>(row), b.at<T>(row), here, a.size);
      pointwise::rms_norm(here, scale, to + row * a.size, a.size, float(eps));
    });
  });
  return {normed, total};
}

std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  check_same("rope", q, k);
  TORCH_CHECK(cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat, "rope takes float32 tables");
  const Rows queries(q), keys(k);
  const Tensor c = cos.contiguous(), s = sin.contiguous();
  TORCH_CHECK(queries.size == 2 * c.size(-1) && keys.size == queries.size, "rope: heads of ", queries.size, " and ",
              keys.size, " elements, tables of ", c.size(-1));
  Tensor new_q = at::empty(q.sizes(), q.options()), new_k = at::empty(k.sizes(), k.options());
  const auto *cosines = c.const_data_ptr<float>(), *sines = s.const_data_ptr<float>();
  with_type(q, "rope", [&](auto type) {
    using T = decltype(type);
    const auto rotate = [&](const Rows& rows, Tensor& out, int64_t token) {
      for (int64_t head = 0; head < rows.inner; head++) {
        const int64_t row = token * rows.inner + head;
        pointwise::rotate(rows.at<T>(row), cosines + token * rows.size / 2, sines + token * rows.size / 2,
                          out.mutable_data_ptr<T>() + row * rows.size, rows.size);
      }
    };
    parallel::loop(q.size(0), elements(queries.size * (queries.inner + keys.inner)), [&](int64_t token) {
      rotate(queries, new_q, token);
      rotate(keys, new_k, token);
    });
  });
  return {new_q, new_k};
}

Tensor silu_mul(const Tensor& gate_up) {
  const Rows rows(gate_up);
  const int64_t size = rows.size / 2;
  Tensor out = at::empty({gate_up.size(0), size}, gate_up.options());
  with_type(gate_up, "silu_mul", [&](auto type) {
    using T = decltype(type);
    auto* to = out.mutable_data_ptr<T>();
    parallel::loop(rows.count(), elements(4 * size), [&](int64_t row) {
      const T* gate = rows.at<T>(row);
      pointwise::silu_mul(gate, gate + size, to + row * size, size);
    });
  });
  return out;
}

// Rows of a token rounded to 8-bit floats, which have no infinity: what is too large would become NaN.
template <class T>
void quantize(const T* from, c10::Float8_e4m3fn* to, int64_t size, float factor, float limit) {
  for (int64_t i = 0; i < size; i++) {
    const float x = float(from[i]) * factor;
    to[i] = c10::Float8_e4m3fn(x > limit ? limit : x < -limit ? -limit : x);
  }
}

void kv_write(Tensor& k_cache, Tensor& v_cache, const Tensor& k, const Tensor& v, const Tensor& slots,
              const std::optional<Tensor>& factors, const std::optional<Tensor>& limit) {
  check_indices("kv_write", slots);
  const Tensor index = slots.contiguous();
  const auto* slot = index.const_data_ptr<int32_t>();
  const int64_t total = k_cache.size(0) * k_cache.size(1);
  const float largest = element(limit, 0, 0.0f);
  for (const bool is_value : {false, true}) {
    Tensor& cache = is_value ? v_cache : k_cache;
    const Tensor& rows = is_value ? v : k;
    TORCH_CHECK(cache.is_contiguous() && cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2),
                "kv_write: rows ", rows.sizes(), " into a cache ", cache.sizes());
    const Tensor source = rows.stride(2) == 1 && rows.stride(1) == rows.size(2) ? rows : rows.contiguous();
    const int64_t size = source.size(1) * source.size(2), stride = source.stride(0);
    const float factor = element(factors, is_value, 1.0f);
    for (int64_t t = 0; t < index.numel(); t++)
      TORCH_CHECK_INDEX(0 <= slot[t] && slot[t] < total, "slot ", slot[t], " of a KV cache of ", total);
    with_type(source, "kv_write", [&](auto type) {
      using T = decltype(type);
      const T* from = source.const_data_ptr<T>();
      with_cache_type<T>(cache, factors.has_value(), "kv_write", [&](auto cached) {
        using C = decltype(cached);
        C* to = cache.mutable_data_ptr<C>();
        if constexpr (std::is_same_v<C, T>)
          for (int64_t t = 0; t < index.numel(); t++)
            std::memcpy(to + slot[t] * size, from + t * stride, size * sizeof(T));
        else
          parallel::loop(index.numel(), elements(4 * size), [&](int64_t t) {
            quantize(from + t * stride, to + slot[t] * size, size, factor, largest);
          });
      });
    });
  }
}

// One call of paged_attention: sizes and where the indices are.
struct Call {
  const Tensor &k_cache, &v_cache;
  int64_t requests, rows, heads, kv_heads, groups, dim, block_size, blocks;
  const int32_t *table, *positions;
  float scale, value_scale;  // of the scores, and of the results
  std::optional<int64_t> window;

  int64_t end(int64_t row) const { return std::min<int64_t>(positions[row] + 1, blocks * block_size); }
  int64_t begin(int64_t row) const { return window ? std::max<int64_t>(0, end(row) - *window) : 0; }

  template <class T>
  attention::Pages<T> pages(const Tensor& cache, int64_t request, int64_t kv_head) const {
    return {cache.const_data_ptr<T>(), table + request * blocks, block_size, kv_heads * dim, kv_head * dim};
  }
};

// Each row by itself: pieces of (row, KV head, 256 tokens) over all threads, then the pieces of a row put together.
// C is the type of the caches.
template <class T, class C>
void attend_rows(const Call& call, const T* q, T* out) {
  const int64_t tokens = call.requests * call.rows, groups = call.groups, dim = call.dim;
  const int64_t wide = (dim + vec::kLanes - 1) / vec::kLanes * vec::kLanes;
  std::vector<int64_t> first(tokens + 1, 0);
  for (int64_t t = 0; t < tokens; t++)
    first[t + 1] = first[t] + (call.end(t) - call.begin(t) + attention::kChunk - 1) / attention::kChunk;
  const int64_t chunks = first[tokens], pieces = chunks * call.kv_heads;
  std::vector<float> maxima(pieces * groups), sums(pieces * groups), partial(pieces * groups * wide);
  parallel::loop(pieces, double(attention::kChunk) * groups * dim * 1e-4, [&](int64_t piece) {
    const int64_t index = piece / call.kv_heads, kv_head = piece % call.kv_heads;
    const int64_t t = std::upper_bound(first.begin(), first.end(), index) - first.begin() - 1;
    std::vector<float> query(groups * wide, 0.0f);
    for (int64_t g = 0; g < groups; g++)
      for (int64_t d = 0; d < dim; d++)
        query[g * wide + d] = float(q[(t * call.heads + kv_head * groups + g) * dim + d]) * call.scale;
    const int64_t begin = call.begin(t) + (index - first[t]) * attention::kChunk;
    attention::chunk(query.data(), call.pages<C>(call.k_cache, t / call.rows, kv_head),
                     call.pages<C>(call.v_cache, t / call.rows, kv_head), begin,
                     std::min(begin + attention::kChunk, call.end(t)), groups, dim, wide, &maxima[piece * groups],
                     &sums[piece * groups], &partial[piece * groups * wide]);
  });
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t head = 0; head < call.heads; head++) {
      const auto at = [&](int64_t index) {
        return (index * call.kv_heads + head / groups) * groups + head % groups;
      };
      float top = attention::kNothing, total = 0.0f;
      for (int64_t i = first[t]; i < first[t + 1]; i++) top = std::max(top, maxima[at(i)]);
      float row[wide];
      std::fill(row, row + wide, 0.0f);
      for (int64_t i = first[t]; i < first[t + 1]; i++) {
        const float factor = std::exp(maxima[at(i)] - top);
        total += sums[at(i)] * factor;
        for (int64_t d = 0; d < wide; d++) row[d] += partial[at(i) * wide + d] * factor;
      }
      for (int64_t d = 0; d < dim; d++) out[(t * call.heads + head) * dim + d] = T(row[d] / total * call.value_scale);
    }
}

// Many rows of one request: its visible tokens packed once, then tiles of rows over all threads. C is the type of the
// caches.
template <class T, class C>
void attend_request(const Call& call, int64_t request, const T* queries, T* out) {
  using W = typename prefill::Words<T>::Type;
  const int64_t first = request * call.rows, dim = call.dim;
  // Rows at the end that repeat a position are padding: nobody reads their results.
  int64_t live = call.rows;
  while (live > 1 && call.positions[first + live - 1] == call.positions[first + live - 2]) live--;
  std::fill(out + (first + live) * call.heads * dim, out + (first + call.rows) * call.heads * dim, T(0.0f));
  int64_t begin = call.begin(first), end = call.end(first);
  for (int64_t row = first; row < first + live; row++)
    begin = std::min(begin, call.begin(row)), end = std::max(end, call.end(row));

  std::vector<prefill::Context<W>> contexts;
  for (int64_t head = 0; head < call.kv_heads; head++) contexts.emplace_back(end - begin, dim);
  const int64_t packs = (end - begin + vec::kLanes - 1) / vec::kLanes;
  parallel::loop(packs * call.kv_heads, elements(4 * vec::kLanes * dim), [&](int64_t i) {
    const int64_t kv_head = i % call.kv_heads, start = i / call.kv_heads * vec::kLanes;
    contexts[kv_head].template pack<T>(call.pages<C>(call.k_cache, request, kv_head),
                                       call.pages<C>(call.v_cache, request, kv_head), begin, start,
                                       std::min(vec::kLanes, end - begin - start));
  });

  const int64_t rows = live * call.groups, tiles = (rows + prefill::kRows - 1) / prefill::kRows;
  const double work = double(end - begin) * dim * prefill::kRows * 6e-5;
  parallel::loop(tiles * call.kv_heads, work, [&](int64_t i) {
    const int64_t kv_head = i / tiles, start = i % tiles * prefill::kRows;
    prefill::Row<T> tile[prefill::kRows];
    const int64_t count = std::min<int64_t>(prefill::kRows, rows - start);
    for (int64_t r = 0; r < count; r++) {
      const int64_t row = first + (start + r) / call.groups;
      const int64_t offset = (row * call.heads + kv_head * call.groups + (start + r) % call.groups) * dim;
      tile[r] = {queries + offset, out + offset, call.begin(row), call.end(row)};
    }
    prefill::tile<W>(tile, count, contexts[kv_head], begin, call.scale, call.value_scale);
  });
}

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                       const Tensor& positions, double scale, std::optional<int64_t> window,
                       const std::optional<Tensor>& factors) {
  check_same("paged_attention", k_cache, v_cache);
  check_indices("paged_attention", block_table);
  check_indices("paged_attention", positions);
  TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "paged_attention takes contiguous caches");
  TORCH_CHECK(scale > 0, "paged_attention: scale ", scale, " is not positive");
  const Tensor queries = q.contiguous(), table = block_table.contiguous(), at_position = positions.contiguous();
  const int64_t tokens = q.size(0), heads = q.size(1), requests = table.size(0), kv_heads = k_cache.size(2);
  TORCH_CHECK(tokens % requests == 0 && heads % kv_heads == 0 && q.size(2) == k_cache.size(3),
              "paged_attention: q ", q.sizes(), ", cache ", k_cache.sizes(), ", block table ", table.sizes());
  const Call call{k_cache, v_cache, requests, tokens / requests, heads, kv_heads, heads / kv_heads, q.size(2),
                  k_cache.size(1), table.size(1), table.const_data_ptr<int32_t>(),
                  at_position.const_data_ptr<int32_t>(), float(scale) * element(factors, 0, 1.0f),
                  element(factors, 1, 1.0f), window};
  Tensor out = at::empty(q.sizes(), q.options());
  with_type(q, "paged_attention", [&](auto type) {
    using T = decltype(type);
    const T* from = queries.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    with_cache_type<T>(k_cache, factors.has_value(), "paged_attention", [&](auto cached) {
      using C = decltype(cached);
      if (call.rows < kManyRows) return attend_rows<T, C>(call, from, to);
      for (int64_t request = 0; request < requests; request++) attend_request<T, C>(call, request, from, to);
    });
  });
  return out;
}

Tensor float_rows(const char* op, const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 2, op, " takes rows of float32");
  return x.contiguous();
}

std::tuple<Tensor, Tensor> top_k(const Tensor& x, int64_t k) {
  const Tensor rows = float_rows("top_k", x);
  const int64_t size = rows.size(1);
  TORCH_CHECK(1 <= k && k <= size, "top_k: ", k, " of ", size);
  Tensor values = at::empty({rows.size(0), k}, rows.options());
  Tensor columns = at::empty({rows.size(0), k}, rows.options().dtype(at::kInt));
  const auto* from = rows.const_data_ptr<float>();
  auto* value = values.mutable_data_ptr<float>();
  auto* column = columns.mutable_data_ptr<int32_t>();
  parallel::loop(rows.size(0), elements(size + 32 * k), [&](int64_t row) {
    choose::top_k(from + row * size, size, k, value + row * k, column + row * k);
  });
  return {values, columns};
}

Tensor argmax(const Tensor& x) { return std::get<1>(top_k(x, 1)).squeeze(1); }

Tensor log_sum_exp(const Tensor& x) {
  const Tensor rows = float_rows("log_sum_exp", x);
  const int64_t size = rows.size(1);
  Tensor out = at::empty({rows.size(0), 1}, rows.options());
  const auto* from = rows.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  parallel::loop(rows.size(0), elements(2 * size),
                 [&](int64_t row) { to[row] = choose::log_sum_exp(from + row * size, size); });
  return out;
}

Tensor mask_logits(const Tensor& logits, const Tensor& mask) {
  check_indices("mask_logits", mask);
  const Tensor rows = float_rows("mask_logits", logits), words = mask.contiguous();
  const int64_t size = rows.size(1), width = words.size(1);
  TORCH_CHECK(words.size(0) == rows.size(0) && 32 * width >= size, "mask_logits: logits ", rows.sizes(), ", mask ",
              words.sizes());
  Tensor out = at::empty(rows.sizes(), rows.options());
  const auto* from = rows.const_data_ptr<float>();
  const auto* bits = words.const_data_ptr<int32_t>();
  auto* to = out.mutable_data_ptr<float>();
  parallel::loop(rows.size(0), elements(size), [&](int64_t row) {
    choose::mask(from + row * size, bits + row * width, to + row * size, size);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(vllm_neuron_cpu, library) {
  library.def("embedding(Tensor ids, Tensor table) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  library.def("logits(Tensor hidden, Tensor weight) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def(
      "kv_write(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, Tensor? factors, "
      "Tensor? limit) -> ()");
  library.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor positions, float scale, "
      "int? window, Tensor? factors) -> Tensor");
  library.def("top_k(Tensor x, int k) -> (Tensor, Tensor)");
  library.def("argmax(Tensor x) -> Tensor");
  library.def("log_sum_exp(Tensor x) -> Tensor");
  library.def("mask_logits(Tensor logits, Tensor mask) -> Tensor");
  library.def("take_failure() -> str", &custom_call::take_failure);
  library.class_<packed::Copies>("Copies").def(torch::init<>()).def("add", &packed::Copies::add);
  library.class_<program::Place>("Place").def(torch::init<int64_t, std::optional<int64_t>>());
  library.class_<program::Program>("Program")
      .def(torch::init<>())
      .def("call", &program::Program::call)
      .def("run", &program::Program::run);
}

TORCH_LIBRARY_IMPL(vllm_neuron_cpu, CPU, library) {
  library.impl("embedding", &embedding);
  library.impl("linear", &linear);
  library.impl("logits", &logits);
  library.impl("rms_norm", &rms_norm);
  library.impl("add_rms_norm", &add_rms_norm);
  library.impl("rope", &rope);
  library.impl("silu_mul", &silu_mul);
  library.impl("kv_write", &kv_write);
  library.impl("paged_attention", &paged_attention);
  library.impl("top_k", &top_k);
  library.impl("argmax", &argmax);
  library.impl("log_sum_exp", &log_sum_exp);
  library.impl("mask_logits", &mask_logits);
}
