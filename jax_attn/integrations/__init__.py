"""The engine as a part of other libraries. Each module needs the library that it is named after."""
