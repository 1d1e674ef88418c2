"""Tools for operators: check what they promise (``check``), and time them (``bench``)."""
