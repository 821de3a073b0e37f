#include "jit/cubin.h"

#include <cstring>

namespace jax_attn {
namespace {

// Copies record `index` of an array at `offset`; false if it does not lie inside the file.
template <typename Record>
bool Read(std::string_view file, uint64_t offset, uint64_t index, Record* record) {
  if (offset > file.size() || index > file.size() / sizeof(Record)) return false;
  const uint64_t begin = offset + index * sizeof(Record);
  if (begin > file.size() || file.size() - begin < sizeof(Record)) return false;
  std::memcpy(record, file.data() + begin, sizeof(Record));
  return true;
}

bool NameIs(std::string_view file, const ElfSection& strings, uint64_t name,
            const std::string& expected) {
  const uint64_t begin = strings.offset + name;
  if (begin > file.size() || file.size() - begin <= expected.size()) return false;
  return file.substr(begin, expected.size()) == expected && file[begin + expected.size()] == 0;
}

// Finds `symbol` in one symbol table and reads the int in its section's contents.
bool FindInt(std::string_view file, const ElfHeader& elf, const ElfSection& symbols,
             const std::string& symbol, int* value) {
  ElfSection strings;
  if (!Read(file, elf.section_offset, symbols.link, &strings)) return false;
  for (uint64_t i = 0; i < symbols.size / sizeof(ElfSymbol); ++i) {
    ElfSymbol entry;
    ElfSection section;
    if (!Read(file, symbols.offset, i, &entry)) return false;
    if (!NameIs(file, strings, entry.name, symbol)) continue;
    if (!Read(file, elf.section_offset, entry.section, &section)) return false;
    if (section.type == kElfNoBits) {  // the file has no bytes of a variable that begins as 0
      *value = 0;
      return true;
    }
    return Read(file, section.offset + entry.value, 0, value);
  }
  return false;
}

}  // namespace

Status ReadCubinInt(std::string_view cubin, const std::string& symbol, int* value) {
  ElfHeader elf;
  if (!Read(cubin, 0, 0, &elf) || std::memcmp(elf.ident, kElf64Magic, sizeof(kElf64Magic)) != 0) {
    return Status::Error("the compiled kernel is not a cubin (64-bit ELF file)");
  }
  for (int i = 0; i < elf.num_sections; ++i) {
    ElfSection section;
    if (!Read(cubin, elf.section_offset, i, &section)) break;
    if (section.type == kElfSymbolTable && FindInt(cubin, elf, section, symbol, value)) {
      return Status::Ok();
    }
  }
  return Status::Error("the compiled kernel does not define " + symbol);
}

}  // namespace jax_attn
