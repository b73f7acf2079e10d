"""The recorder, which appends transitions to a dataset on disk, and its files."""
