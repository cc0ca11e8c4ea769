// Copies of matrices of bfloat16 in three quarters of their memory, for products that take as long as reading them takes.
//
// The first byte of a bfloat16 is its sign and all but the last bit of its exponent, and the weights of a few rows rarely
// have more than 16 of these: a code of 4 bits for each is kept, and the second byte as it is. The numbers with the rarest
// first bytes, if there are more, are in a list beside them, so that no bit is ever lost. That exponents of weights hold
// less than 3 bits of information: T. Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression for Efficient GPU
// Inference via Dynamic-Length Float", 2025.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace packed {

constexpr int kRows = 4;                     // of a tile
constexpr int64_t kBlock = 4 * vec::kLanes;  // columns of a block, for which a register of bytes has room
constexpr int64_t kBlockBytes = kRows * kBlock * 3 / 2;
constexpr int64_t kListed = 512;             // of so many numbers one may be in the list

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define PACKED_MATRICES 1
#endif

constexpr uint8_t kCodes = 16;

// First bytes by their codes.
using Table = std::array<uint8_t, kCodes>;

// A number that is not as its code says.
struct Listed {
  uint32_t place;  // of its tile's numbers, block by block and there row by row
  uint16_t bits;
};

// `rows` x `columns` in tiles of kRows rows; rows that are left over are not here. A tile has blocks of kBlock columns: the
// codes of rows 0 (low halves of the bytes) and 1, of rows 2 and 3, and the second bytes of each row.
struct Matrix {
  c10::weak_intrusive_ptr<c10::StorageImpl> original;
  at::Tensor memory;
  int64_t rows, columns;
  std::vector<Table> tables;    // of each tile
  std::vector<int64_t> begins;  // of each tile's list
  std::vector<Listed> lists;    // in the order of places, each ended by a place after all others

  int64_t tile_bytes() const { return (columns + kBlock - 1) / kBlock * kBlockBytes; }
  int64_t bytes() const { return rows / kRows * tile_bytes(); }
  const uint8_t* tile(int64_t i) const { return memory.const_data_ptr<uint8_t>() + i * tile_bytes(); }
};

#if defined(PACKED_MATRICES)
// A register of bytes, and the instructions for it, which work on 16 bytes at a time each.
#if defined(__AVX512BW__)
using Bytes = __m512i;
inline Bytes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes repeat(const uint8_t* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline Bytes low_half(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_half(Bytes x) { return low_half(_mm512_srli_epi16(x, 4)); }
inline Bytes pick(Bytes table, Bytes index) { return _mm512_shuffle_epi8(table, index); }
inline vec::Words low_words(Bytes a, Bytes b) { return (vec::Words)_mm512_unpacklo_epi8(a, b); }
inline vec::Words high_words(Bytes a, Bytes b) { return (vec::Words)_mm512_unpackhi_epi8(a, b); }
#else
using Bytes = __m256i;
inline Bytes load(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Bytes repeat(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
inline Bytes low_half(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_half(Bytes x) { return low_half(_mm256_srli_epi16(x, 4)); }
inline Bytes pick(Bytes table, Bytes index) { return _mm256_shuffle_epi8(table, index); }
inline vec::Words low_words(Bytes a, Bytes b) { return (vec::Words)_mm256_unpacklo_epi8(a, b); }
inline vec::Words high_words(Bytes a, Bytes b) { return (vec::Words)_mm256_unpackhi_epi8(a, b); }
#endif

// The numbers of one row of a block at place `begin`, in their order. `next` is the first in the list that has not been.
template <int ROW>
ALWAYS_INLINE inline void unpack(const uint8_t* block, Bytes table, uint32_t begin, const Listed*& next,
                                 vec::Words* words) {
  const Bytes pair = load(block + ROW / 2 * kBlock), second = load(block + (2 + ROW) * kBlock);
  const Bytes first = pick(table, ROW % 2 ? high_half(pair) : low_half(pair));
  words[0] = low_words(second, first);
  words[1] = high_words(second, first);
  if (__builtin_expect(next->place < begin + kBlock, 0)) {
    uint16_t numbers[kBlock];
    std::memcpy(numbers, words, sizeof numbers);
    for (; next->place < begin + kBlock; next++) numbers[next->place - begin] = next->bits;
    std::memcpy(words, numbers, sizeof numbers);
  }
}

// Calls f(byte, column) for each column of a block and the byte of a register where its number is, for `unpack`.
template <class Function>
ALWAYS_INLINE inline void interleave(const Function& f) {
  for (int64_t byte = 0; byte < kBlock; byte++) f(byte, byte % 16 / 8 * (kBlock / 2) + byte / 16 * 8 + byte % 8);
}

// Packs the numbers [kRows, K] of a tile.
inline void pack(const uint16_t* numbers, int64_t K, uint8_t* to, Table& table, std::vector<Listed>& list) {
  std::array<std::array<int, 256>, kRows> by_row{};  // each of its own, as a number often has the first byte of the last
  for (int64_t k = 0; k < K; k++)
    vec::unroll<kRows>([&](auto row) ALWAYS_INLINE { by_row[row][numbers[row * K + k] >> 8]++; });
  std::array<int, 256> counts{};
  for (const auto& row : by_row) std::transform(row.begin(), row.end(), counts.begin(), counts.begin(), std::plus<>());
  std::array<uint8_t, 256> firsts, codes;
  std::iota(firsts.begin(), firsts.end(), 0);
  std::partial_sort_copy(firsts.begin(), firsts.end(), table.begin(), table.end(),
                         [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
  codes.fill(kCodes);
  for (uint8_t code = 0; code < kCodes; code++) codes[table[code]] = code;

  for (int64_t k = 0; k < K; k += kBlock, to += kBlockBytes) {
    const int64_t count = std::min(kBlock, K - k);
    uint8_t code[kRows][kBlock] = {};
    for (int64_t row = 0; row < kRows; row++) {
      uint16_t block[kBlock] = {};
      std::copy_n(numbers + row * K + k, count, block);
      for (int64_t i = 0; i < count; i++) {
        code[row][i] = codes[block[i] >> 8];
        if (__builtin_expect(code[row][i] == kCodes, 0)) {
          list.push_back({uint32_t(k * kRows + row * kBlock + i), block[i]});
          code[row][i] = 0;
        }
      }
      interleave([&](int64_t byte, int64_t i) { to[(2 + row) * kBlock + byte] = uint8_t(block[i]); });
    }
    for (int64_t pair = 0; pair < kRows / 2; pair++)
      interleave([&](int64_t byte, int64_t i) {
        to[pair * kBlock + byte] = code[2 * pair][i] | code[2 * pair + 1][i] << 4;
      });
  }
  list.push_back({UINT32_MAX, 0});
}
#endif

// The matrix, at the beginning of `memory`; nothing if it has not room there, or the lists would be long.
inline std::optional<Matrix> pack(const at::Tensor& weight, const at::Tensor& memory) {
#if defined(PACKED_MATRICES)
  const int64_t K = weight.size(1), tiles = weight.size(0) / kRows;
  Matrix matrix{weight.storage().getWeakStorageImpl(), memory, tiles * kRows, K, {}, {}, {}};
  if (tiles * K == 0 || matrix.bytes() > memory.numel() || kRows * (K + kBlock) > UINT32_MAX) return std::nullopt;
  matrix.tables.resize(tiles);
  std::vector<std::vector<Listed>> lists(tiles);
  const auto* numbers = static_cast<const uint16_t*>(weight.const_data_ptr());
  auto* to = memory.mutable_data_ptr<uint8_t>();
  std::atomic<int64_t> listed{0};
  parallel::loop(tiles, double(K) * 8e-3, [&](int64_t i) {
    if (listed.load() > tiles * kRows * K / kListed) return;
    pack(numbers + i * kRows * K, K, to + i * matrix.tile_bytes(), matrix.tables[i], lists[i]);
    listed.fetch_add(int64_t(lists[i].size()) - 1);
  });
  if (listed.load() > tiles * kRows * K / kListed) return std::nullopt;
  for (const auto& list : lists) {
    matrix.begins.push_back(int64_t(matrix.lists.size()));
    matrix.lists.insert(matrix.lists.end(), list.begin(), list.end());
  }
  return matrix;
#else
  return std::nullopt;
#endif
}

// Packed matrices by the addresses of their originals, as long as both live.
class Matrices {
 public:
  static Matrices& get() {
    static auto* matrices = new Matrices;
    return *matrices;
  }

  void add(const void* original, const std::shared_ptr<const Matrix>& matrix) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto i = matrices_.begin(); i != matrices_.end();) i = i->second.expired() ? matrices_.erase(i) : std::next(i);
    matrices_[original] = matrix;
  }

  std::shared_ptr<const Matrix> find(const void* original, int64_t rows, int64_t columns) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = matrices_.find(original);
    if (found == matrices_.end()) return nullptr;
    auto matrix = found->second.lock();
    if (!matrix || matrix->original.expired()) return nullptr;
    return matrix->rows == rows / kRows * kRows && matrix->columns == columns ? matrix : nullptr;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::weak_ptr<const Matrix>> matrices_;
};

// Copies of some weights, which products of few rows use as long as this lives.
class Copies : public torch::CustomClassHolder {
 public:
  // Packs a weight into the beginning of `memory`. Returns the bytes that are taken: none if it is no matrix of numbers
  // that can be packed. Nobody may write to either any more.
  int64_t add(const at::Tensor& weight, const at::Tensor& memory) {
    TORCH_CHECK(memory.scalar_type() == at::kByte && memory.is_contiguous(), "memory is contiguous and of bytes");
    if (weight.scalar_type() != at::kBFloat16 || weight.dim() != 2 || !weight.is_contiguous()) return 0;
    auto matrix = pack(weight, memory);
    if (!matrix) return 0;
    matrices_.push_back(std::make_shared<const Matrix>(std::move(*matrix)));
    Matrices::get().add(weight.const_data_ptr(), matrices_.back());
    return matrices_.back()->bytes();
  }

 private:
  std::vector<std::shared_ptr<const Matrix>> matrices_;
};

}  // namespace packed
