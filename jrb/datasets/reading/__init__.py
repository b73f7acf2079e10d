"""Readers of HDF5, npz, Arrow and images, and the tables of columns that formats build on."""
