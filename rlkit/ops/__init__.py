"""Mathematics on tensors and numbers.

What belongs here: log-probs, divergences, masked and grouped statistics, packing of rows, kernels in plain PyTorch,
seeded random numbers. What does not: anything that knows a model, a recipe, a rank or a device of its own.
"""
