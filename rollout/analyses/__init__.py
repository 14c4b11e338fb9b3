"""The tables of `visor compare`: a function for each, over the runs of a comparison.

Each module holds analyses of one kind. A function takes a `Study` and returns a `Table`, or a sentence that
says what it lacks. Definitions follow the TAEC paper's appendices; the numbers of its tables stand in the
docstrings.
"""
