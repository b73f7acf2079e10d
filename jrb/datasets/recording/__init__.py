"""Recordings: everything a buffer is given, kept on disk by `jrb.datasets.Recorder`."""
