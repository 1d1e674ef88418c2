"""Cases, checks and benchmark of scaled_add, for the checker and the tests; not imported at run time."""
