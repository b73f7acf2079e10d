"""Datasets in other libraries' layouts, written from buffers and from datasets."""
