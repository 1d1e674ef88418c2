"""Cases, checks and benchmark of gated_delta_rule, for the checker and the tests; not imported at run time."""
