// Reads cubins (64-bit little-endian ELF files) without a GPU.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "status.h"

namespace jax_attn {

// The ELF records that are read here. <elf.h> does not exist on every platform.
struct ElfHeader {
  unsigned char ident[16];  // begins with kElf64Magic
  uint16_t type, machine;
  uint32_t version;
  uint64_t entry, program_offset, section_offset;
  uint32_t flags;
  uint16_t header_size, program_size, num_programs, section_size, num_sections, names_section;
};
static_assert(sizeof(ElfHeader) == 64, "ELF-64");

struct ElfSection {
  uint32_t name, type;
  uint64_t flags, address, offset, size;
  uint32_t link, info;
  uint64_t alignment, entry_size;
};
static_assert(sizeof(ElfSection) == 64, "ELF-64");
inline constexpr unsigned char kElf64Magic[5] = {0x7f, 'E', 'L', 'F', 2};
inline constexpr uint32_t kElfSymbolTable = 2;
inline constexpr uint32_t kElfNoBits = 8;

struct ElfSymbol {
  uint32_t name;
  unsigned char info, other;
  uint16_t section;
  uint64_t value, size;
};
static_assert(sizeof(ElfSymbol) == 24, "ELF-64");

// Reads the initial value of `int symbol`, a __device__ variable with an initialiser.
Status ReadCubinInt(std::string_view cubin, const std::string& symbol, int* value);

}  // namespace jax_attn
