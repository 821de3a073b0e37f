// Prefetches keys and values during the arithmetic of a pass, at an even rate. Internal linkage:
// kernels.h.
//
// Memory throughput is highest if there are always misses in flight, but not more than a core can
// track. So the lines of a block are spread over the time of its phases, and prefetching continues
// into the next block while the values of this one are multiplied.
//
// A prefetch of a page whose translation is missing stalls all later accesses until the translation
// arrives. So pages are touched before their lines are fetched, a few at once, which the core
// translates in parallel.
#pragma once

#include "cpu/simd/simd_types.h"

namespace jax_attn {
namespace {

// Divides rows into pieces of one page, in memory order.
class PagePieces {
 public:
  struct Piece {
    const char *begin, *end;  // whole lines; null: nothing is left
  };

  // Appends the first `bytes` of rows[0, num_rows). The caller keeps the array valid until the
  // second Append after this one.
  void Append(const char* const* rows, i64 num_rows, i64 bytes) {
    if (num_rows <= 0) return;
    if (appended_ - taken_ == kStretches) ++taken_;
    stretches_[appended_++ % kStretches] = {rows, rows + num_rows, bytes};
  }

  JAX_ATTN_KERNEL Piece Next() {
    if (next_ == kAtOnce) {
      next_ = 0;
      do {
        memcpy(pieces_, pieces_ + kAtOnce, sizeof(pieces_) / 2);
        for (int i = kAtOnce; i < 2 * kAtOnce; ++i) pieces_[i] = Cut();
      } while (pieces_[0].begin == nullptr && pieces_[kAtOnce].begin != nullptr);
    }
    const Piece piece = pieces_[next_++];
    given_ += piece.end - piece.begin;
    return piece;
  }

  // Bytes of all pieces so far, not counting bytes before the rows in their first lines: otherwise
  // a caller that compares this with the bytes of rows would fall behind, run by run.
  i64 given() const { return given_; }

 private:
  static constexpr i64 kPageBytes = 4096;
  static constexpr int kStretches = 4, kAtOnce = 4;
  struct Stretch {
    const char* const* row;
    const char* const* end;
    i64 bytes;
  };

  Piece Cut() {
    if (at_ >= end_ && !NextRun()) return {nullptr, nullptr};
    const char* page_end =
        reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(at_) | (kPageBytes - 1)) + 1);
    const Piece piece = {at_, page_end < end_ ? page_end : end_};
    at_ = piece.end;
    __builtin_prefetch(piece.begin, 0, 2);
    return piece;
  }

  // Takes the next rows that are contiguous in memory.
  bool NextRun() {
    if (taken_ == appended_) return false;
    Stretch& from = stretches_[taken_ % kStretches];
    at_ = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(*from.row) &
                                        ~static_cast<uintptr_t>(kCacheLine - 1));
    given_ -= *from.row - at_;
    end_ = *from.row + from.bytes;
    while (++from.row < from.end && *from.row == end_) end_ += from.bytes;
    if (from.row == from.end) ++taken_;
    return true;
  }

  Piece pieces_[2 * kAtOnce] = {};  // the second half was touched when the first began
  int next_ = kAtOnce;
  i64 given_ = 0;
  const char *at_ = nullptr, *end_ = nullptr;  // the rest of the current run
  Stretch stretches_[kStretches] = {};
  i64 appended_ = 0, taken_ = 0;
};

// State of the prefetch. Kernels copy it, to keep it in registers.
struct BesideFetch {
  PagePieces* pieces = nullptr;
  const char* line = nullptr;
  const char* line_end = nullptr;
  i64 due = 0,
      rate = 0;  // due: part of a line; rate: lines per byte of work; both in units of 2^-kRateBits
  static constexpr int kRateBits = 20;

  // From now on fetches `lines` evenly during `bytes` of work.
  void Share(i64 lines, i64 bytes) { rate = bytes > 0 ? (lines << kRateBits) / bytes : 0; }

  // Fetches during n bytes of work.
  JAX_ATTN_INLINE void Bytes(i64 n) {
    for (due += n * rate; due >= i64{1} << kRateBits; due -= i64{1} << kRateBits) {
      if (line >= line_end) {
        const PagePieces::Piece piece = pieces->Next();
        if (piece.begin == nullptr) {
          due = 0;
          return;
        }
        line = piece.begin;
        line_end = piece.end;
      }
      __builtin_prefetch(line, 0, 2);
      line += kCacheLine;
    }
  }
  JAX_ATTN_INLINE void Lines(i64 n) { Bytes(n * kCacheLine); }
  JAX_ATTN_INLINE void Line() { Bytes(kCacheLine); }

  // Bytes fetched so far.
  i64 fetched() const { return pieces->given() - (line < line_end ? line_end - line : 0); }
};

}  // namespace
}  // namespace jax_attn
