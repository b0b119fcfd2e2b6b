"""Ranks, collectives and strategies: the only room that knows them.

What belongs here: agreement among ranks (`ranks`), FSDP2 (`fsdp2`), tensor parallelism, offloading, and tensors
shared with other processes. What does not: what is agreed on, and why; callers never ask for a rank's number.
"""
