"""A report in the forms that its readers want: text, strict JSON, JUnit XML, one HTML page."""
