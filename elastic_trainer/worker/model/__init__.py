"""One rank's copy of the model: how gradients are summed, loss scaling, BatchNorm over all ranks, moving averages."""
