"""Membership, conductors and recovery on virtual time, in one thread: the product's core, key, view,
conductor and recovery against a simulated world.

Everything random comes from one seed, so ``python -m tests.simulation SEED`` repeats any schedule, with its trace.
"""
