"""What needs a CUDA device: `python -m pytest tests -m gpu` where there is one."""
