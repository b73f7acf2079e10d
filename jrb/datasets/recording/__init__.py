"""Recordings: what a buffer is ever given, kept on the disk by `jrb.datasets.Recorder`."""
