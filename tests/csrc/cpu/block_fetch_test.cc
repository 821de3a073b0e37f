// Prefetches during a pass: every line of the rows is fetched once and in order, page by page, and
// as evenly as requested. Addresses are plain numbers here, and prefetches of them do nothing.
#include "cpu/kernels/block_fetch.h"

#include <cstdio>
#include <vector>

namespace jax_attn {
namespace {

int g_failures = 0;

#define CHECK(condition)                                                \
  do {                                                                  \
    if (!(condition)) {                                                 \
      std::printf("FAILED %s:%d %s\n", __FILE__, __LINE__, #condition); \
      ++g_failures;                                                     \
    }                                                                   \
  } while (0)

const char* Address(i64 at) { return reinterpret_cast<const char*>(at); }

using Rows = std::vector<const char*>;

Rows RowsAt(i64 first, i64 step, i64 num_rows) {
  Rows rows;
  for (i64 i = 0; i < num_rows; ++i) rows.push_back(Address(first + i * step));
  return rows;
}

// Lines of rows in order; contiguous rows share the line at their border.
std::vector<i64> LinesOf(const Rows& rows, i64 bytes) {
  std::vector<i64> lines;
  i64 end = 0;
  for (const char* row : rows) {
    const i64 begin = reinterpret_cast<i64>(row);
    i64 line = begin / kCacheLine;
    if (begin == end && end % kCacheLine != 0) ++line;
    end = begin + bytes;
    for (; line * kCacheLine < end; ++line) lines.push_back(line);
  }
  return lines;
}

void TestPieces(const std::vector<Rows>& stretches, i64 bytes) {
  PagePieces pieces;
  std::vector<i64> want, got;
  i64 row_bytes = 0;
  for (const Rows& rows : stretches) {
    row_bytes += static_cast<i64>(rows.size()) * bytes;
    pieces.Append(rows.data(), static_cast<i64>(rows.size()), bytes);
    for (i64 line : LinesOf(rows, bytes)) want.push_back(line);
  }
  for (;;) {
    const PagePieces::Piece piece = pieces.Next();
    if (piece.begin == nullptr) break;
    CHECK(reinterpret_cast<i64>(piece.begin) / 4096 ==
          (reinterpret_cast<i64>(piece.end) - 1) / 4096);
    for (const char* line = piece.begin; line < piece.end; line += kCacheLine) {
      got.push_back(reinterpret_cast<i64>(line) / kCacheLine);
    }
  }
  CHECK(got == want);
  CHECK(pieces.given() == row_bytes);
}

// Works `step` bytes at a time: the fetched amount is never more than a line away from the due one.
void TestEvenness(i64 lines, i64 bytes, i64 step) {
  const Rows rows = RowsAt(1 << 20, 1024, 256);
  PagePieces pieces;
  pieces.Append(rows.data(), 256, 1024);
  BesideFetch fetch{&pieces};
  fetch.Share(lines, bytes);
  for (i64 done = step; done <= bytes; done += step) {
    fetch.Bytes(step);
    const double due = static_cast<double>(lines) * done / bytes;
    const double fetched = static_cast<double>(fetch.fetched()) / kCacheLine;
    CHECK(fetched <= due + 0.01 && fetched >= due - 1.1);
  }
}

}  // namespace
}  // namespace jax_attn

int main() {
  using namespace jax_attn;
  TestPieces({}, 64);
  TestPieces({RowsAt(1 << 20, 256, 1)}, 256);
  TestPieces({RowsAt(1 << 20, 256, 128)}, 256);                             // one head
  TestPieces({RowsAt(1 << 20, -65536, 16), RowsAt(4096, 8192, 7)}, 2048);   // pages of one token
  TestPieces({RowsAt(3 << 20, 1056, 40), RowsAt(1 << 20, 1056, 3)}, 1056);  // not whole lines
  TestPieces({RowsAt((1 << 20) + 32, 8224, 40), RowsAt(1 << 24, 9000, 9)}, 1056);  // nor pages
  TestPieces({RowsAt((1 << 20) + 3072, 32768, 9)}, 2048);                    // across a page's end
  TestPieces({RowsAt(1 << 20, 16384, 5), RowsAt(9 << 20, 16384, 5)}, 8192);  // more than a page
  TestPieces({RowsAt(0x10000, 512, 8), RowsAt(0x20000, 512, 8), RowsAt(0x30000, 512, 8),
              RowsAt(0x40000, 512, 8)},
             512);
  TestEvenness(1000, 64'000, 512);
  TestEvenness(300, 100'000, 100);
  TestEvenness(4096, 16'384, 16);
  {
    PagePieces none;
    BesideFetch fetch{&none};
    fetch.Share(100, 100);
    fetch.Bytes(1000);
    CHECK(fetch.fetched() == 0);
  }
  std::printf("block_fetch_test: %s\n", g_failures ? "FAILED" : "ok");
  return g_failures ? 1 : 0;
}
