"""The papers' tables and figures as data, one runner for all of them, and what comes out.

    catalogue   which experiments there are         definition, section, setting   what a file says
    grid        the rows of an experiment           rows       the file that rows are kept in
    worker      takes rows and makes them           runner     starts workers and watches them
    training_row  one row                           statistics, tables   from rows to numbers
    comparison  the same for a user's own data

`python -m vestige.lab NAME --workers 16` is `vestige reproduce` without the command line's
libraries, for machines that have torch and little else.
"""
