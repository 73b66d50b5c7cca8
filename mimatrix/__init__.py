"""MiMatrix: train PyTorch models on clusters whose machines are not alike."""

__version__ = "0.1.0"
