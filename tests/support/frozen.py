"""Import this last in a process that others are forked from: they never look for garbage among what it has imported."""

import gc

gc.collect()
gc.freeze()
