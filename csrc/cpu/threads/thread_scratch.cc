#include "cpu/threads/thread_scratch.h"

#include <memory>
#include <new>

namespace jax_attn {
namespace {

class Scratch {
 public:
  void* Get(size_t bytes) {
    if (bytes > size_) {
      data_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
      size_ = bytes;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

}  // namespace

void* ThreadScratch(size_t bytes) {
  static thread_local Scratch scratch;
  return scratch.Get(bytes);
}

}  // namespace jax_attn
