"""Cases, checks and benchmark of experts, for the checker and the tests; not imported at run time."""
