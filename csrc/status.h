// Errors are values: one sentence with op, argument, expected and got. An empty message is success.
#pragma once

#include <string>
#include <utility>

namespace jax_attn {

struct [[nodiscard]] Status {
  std::string message;

  static Status Ok() { return {}; }
  static Status Error(std::string message) { return {std::move(message)}; }
  bool ok() const { return message.empty(); }
};

// Returns the Status of an expression from a function that returns a Status, unless it is fine.
#define JAX_ATTN_RETURN_IF_ERROR(expression)                                      \
  do {                                                                            \
    if (::jax_attn::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

}  // namespace jax_attn
