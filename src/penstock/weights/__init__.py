"""Files to named tensors: locating, reading, dequantising and binding."""
