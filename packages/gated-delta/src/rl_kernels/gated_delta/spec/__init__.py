"""Cases, checks and benchmark of the package's operators, for the checker and the tests; not imported at run time."""
