"""Steps on their way: out of files into buffers, into copies of them, into new datasets."""
