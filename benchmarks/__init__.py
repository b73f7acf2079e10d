"""How fast jrb is, beside others: `python -m benchmarks`, or `jrb bench`.

`peers/` has a file for each library that is compared, `workloads/` one for each group of cases,
`report/` what becomes of the figures. A new peer is a class in `peers/` and a line in
`peers/__init__.py`; a new workload a module with `cases` and a line in `workloads/__init__.py`.
"""
