"""The membership protocol on virtual time, in one thread: the product's core, key, view and
conductor against a simulated world.

Everything random comes from one seed, so ``python -m tests.simulation SEED`` repeats any schedule, with its trace.
"""
