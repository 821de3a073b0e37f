"""Loading of safetensors files into params. Private."""
