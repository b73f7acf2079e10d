"""Benchmarks of jrb and other libraries: `python -m benchmarks`, or `jrb bench`.

`peers/` has one file per compared library, `workloads/` one per group of cases, and `report/`
writes the results. To add a peer, add a class in `peers/` and a line in `peers/__init__.py`. To add
a workload, add a module with `cases` and a line in `workloads/__init__.py`.
"""
