"""The papers' tables and figures as data, one runner for all of them, and what comes out.

    catalogue   which experiments there are         definition, fields, reading    what a file says
    grid, setting  the rows of an experiment        rows       the file that rows are kept in
    training_row  makes one row                     runner     makes all that are missing
    statistics, summary, tables   from rows to numbers   report   plots and pages
    comparison  the same for a user's own data

`python -m vestige.lab NAME --workers 16` is `vestige reproduce` without the command line's
libraries, for machines that have torch and little else.
"""
