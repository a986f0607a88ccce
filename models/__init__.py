"""A decoder-only transformer in Flax NNX. To read in order: config, layers, attention, transformer, generate."""
