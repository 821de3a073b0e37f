"""The forward pass of decoders, on one device or over the heads of a mesh axis. Private."""
