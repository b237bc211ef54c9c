"""Image classification: MNIST and class folders."""
