"""TorchEngine: samples with PyTorch in the trainer's process, on its weights.

What belongs here: batched decoding with a cache of keys and values, fused layers, CUDA graphs, samplers, and the
replay of recorded completions. What does not: servers and their processes (`rlkit_servers`).
"""
