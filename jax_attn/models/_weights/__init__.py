"""From safetensors files to params. Private."""
