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

}  // namespace jax_attn
