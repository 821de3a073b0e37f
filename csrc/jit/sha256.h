// SHA-256 (FIPS 180-4) of a byte string as 64 lower-case hex digits.
#pragma once

#include <string>
#include <string_view>

namespace jax_attn {

std::string Sha256Hex(std::string_view data);

}  // namespace jax_attn
