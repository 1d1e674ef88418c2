"""What one does to operators: hold them to what they promise (``check``), and time them (``bench``)."""
