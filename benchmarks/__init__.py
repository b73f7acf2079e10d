"""Benchmarks of jrb and other libraries: `python -m benchmarks`, or `jrb bench`.

`peers/` has a file for each library that is compared, `workloads/` has one for each group of cases,
and `report/` writes the results. To add a peer, write a class in `peers/` and a line in
`peers/__init__.py`; to add a workload, a module with `cases` and a line in `workloads/__init__.py`.
"""
